"""A plan as a shell script: a dry run to paste, which starts the same job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from fleetrun.model import LaunchPlan, ProcessSpec, Request
from fleetrun.rundir import arguments, secrets
from fleetrun.text import format_ranges

# A line that is pasted into a terminal without line editing may not pass 4,095 bytes.
_LINE_LIMIT = 1000


def script(plans: Sequence[LaunchPlan], request: Request, *, here: int) -> str:
    """Return text that starts the ranks of plan HERE when it is pasted into a shell.

    Each node is one here-document that `sh` reads, so any interactive shell takes it unharmed
    (no history expansion, no change of folder, no `exit` of the user's shell). The blocks of other
    hosts go to `:`, which ignores them; ours is last, so its exit code is the one that counts.
    """
    places = [place for place in range(len(plans)) if place != here] + [here]
    return "\n".join(_block(plans[place], request, active=place == here) for place in places)


def _block(plan: LaunchPlan, request: Request, *, active: bool) -> str:
    lines = [*_preamble(plan, request, active=active), *_preparation(plan)]
    # A host without trainers cannot tell when the trainers are done.
    is_whole = len({process.essential for process in plan.processes}) == 1
    if not is_whole:
        lines.append("awaited=")
    for process in plan.processes:
        lines += ["", f"# {process.name}", _start(plan, process), 'pids="$pids $!"']
        if process.essential and not is_whole:
            lines.append('awaited="$awaited $!"')
    pids, purpose = (
        ("$pids", "all") if is_whole else ("$awaited", "the trainers, then stop the others")
    )
    lines += [
        "",
        *_TRAPS,
        f"# Wait for {purpose}; the first failure in this order is the exit code.",
        "code=0",
        f'for pid in {pids}; do wait "$pid" || {{ last=$?; [ $code -ne 0 ] || code=$last; }}; done',
        *(() if is_whole else ("kill $pids 2>/dev/null; wait",)),
        "exit $code",
    ]
    body = "\n".join(lines) + "\n"
    mark = "FLEETRUN"
    # A script's argument may contain the line that would end the block.
    while mark in body.split("\n"):
        mark += "_"
    return f"{'sh' if active else ':'} <<'{mark}'\n{body}{mark}\n"


def _preamble(plan: LaunchPlan, request: Request, *, active: bool) -> list[str]:
    """Return comments about this block, and a check that its secrets are set."""
    host = plan.nodes[plan.node_rank]
    lines = [f"# {request.script.target!a} on node {plan.node_rank}, host {host}"]
    if not active:
        lines.append("# Not for this host. To start it, paste this block there with sh for the :")
    for name, value in request.restored:
        if not _is_shell_name(name):
            continue
        word = f"unset {name}" if value is None else f"export {name}={quoted(value)}"
        lines.append(f"{word}  # as in the manifest")
    for name in _secrets(plan):
        if _is_shell_name(name):
            lines.append(f': "${{{name}:?is secret, so its value is not here: export it first}}"')
        else:
            # A shell does not pass on a variable of such a name, so exporting it would not help.
            lines.append(f"# {name!a} is secret, and no name for a shell variable: it is left out")
    return lines


def _secrets(plan: LaunchPlan) -> list[str]:
    pairs = [pair for process in plan.processes for pair in process.env.items()]
    names = {name for name, value in pairs if secrets.redact(name, value) != value}
    for process in plan.processes:
        names |= {hidden.variable for hidden in arguments.conceal(process.argv)[1]}
    return sorted(names)


def _preparation(plan: LaunchPlan) -> list[str]:
    logs = [_log(plan, process) for process in plan.processes]
    folders = sorted({path.rpartition("/")[0] for path in [*logs, *plan.files, *plan.links]} - {""})
    return [
        f"cd {quoted(plan.cwd)} || exit 1",
        *(f"mkdir -p {quoted(folder)} || exit 1" for folder in folders),
        *(
            f"printf %s {quoted(text)} >{quoted(path)} || exit 1"
            for path, text in sorted(plan.files.items())
        ),
        *(
            f"ln -sf {quoted(target)} {quoted(path)} || exit 1"
            for path, target in sorted(plan.links.items())
        ),
        "pids=",
    ]


# Not before all have started: between fork and exec a child still has the shell's traps, and would
# lose a signal.
_TRAPS = (
    "trap 'kill $pids 2>/dev/null; wait; exit 130' INT",
    "trap 'kill $pids 2>/dev/null; wait; exit 143' HUP TERM",
)


def _start(plan: LaunchPlan, process: ProcessSpec) -> str:
    argv = [quoted(word) for word in process.argv]
    for hidden in arguments.conceal(process.argv)[1]:
        before = quoted(hidden.before) if hidden.before else ""
        argv[hidden.at] = f'{before}"${hidden.variable}"'
    # `env` would take a command with an equals sign in its path for one more variable.
    if "=" in process.argv[0]:
        argv = ["sh", "-c", "'exec \"$@\"'", "sh", *argv]
    if process.cpus:
        argv = ["taskset", "-c", format_ranges(process.cpus, ","), *argv]
    words = [
        "env",
        *(f"-u {quoted(name)}" for name in process.unset),
        *_assignments(process.env),
        " ".join(argv),
        f"</dev/null >>{quoted(_log(plan, process))} {_errors(plan, process)} &",
    ]
    return " \\\n  ".join(words)


def _assignments(env: Mapping[str, str]) -> Iterator[str]:
    for name, value in env.items():
        if secrets.redact(name, value) == value:
            yield f"{quoted(name)}={quoted(value)}"
        elif _is_shell_name(name):
            yield f'{name}="${name}"'


def _is_shell_name(name: str) -> bool:
    return name.isidentifier() and name.isascii()


def _log(plan: LaunchPlan, process: ProcessSpec) -> str:
    return f"{plan.run_dir}/{process.log}"


def _errors(plan: LaunchPlan, process: ProcessSpec) -> str:
    """Return the redirection of standard error."""
    if not process.error_log:
        return "2>&1"
    return f"2>>{quoted(f'{plan.run_dir}/{process.error_log}')}"


def quoted(text: str) -> str:
    r"""Return TEXT as one word of a POSIX shell, in characters that survive a terminal.

    >>> print(quoted("it is"), quoted(""), quoted("--lr=0.1"))
    'it is' '' --lr=0.1
    >>> print(quoted("caf\udce9"))
    caf"$(printf '\351')"
    """
    # Bytes that are not UTF-8, and control characters: a tab would request completions.
    fragile = re.compile("([\x01-\x09\x0b-\x1f\x7f-\x9f\udc80-\udcff]+)")
    words: list[str] = []
    for place, piece in enumerate(fragile.split(text)):
        if place % 2:
            octal = "".join(f"\\{byte:03o}" for byte in piece.encode("utf-8", "surrogateescape"))
            words.append(f"\"$(printf '{octal}')\"")
        elif piece:
            starts = range(0, len(piece), _LINE_LIMIT)
            words.append("\\\n".join(shlex.quote(piece[at : at + _LINE_LIMIT]) for at in starts))
    return "".join(words) or "''"
