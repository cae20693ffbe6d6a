"""A plan as a shell script, which starts the same ranks of this host."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from fleetrun.model import LaunchPlan, ProcessSpec, Request
from fleetrun.rundir import arguments, secrets
from fleetrun.text import format_ranges

# Not before all have started: between fork and exec a child still has the shell's traps, and would
# lose a signal.
_TRAPS = (
    "trap 'kill $pids 2>/dev/null; wait; exit 130' INT",
    "trap 'kill $pids 2>/dev/null; wait; exit 143' HUP TERM",
)


def script(plan: LaunchPlan, request: Request) -> str:
    """Return a script for sh that starts the ranks of PLAN and waits for them."""
    # A host without trainers cannot tell when the trainers are done.
    is_whole = len({process.essential for process in plan.processes}) == 1
    lines = [
        "#!/bin/sh",
        f"# {request.script.target!a} on node {plan.node_rank}, host {plan.nodes[plan.node_rank]}",
        *_variables(plan, request),
        *_preparation(plan),
        "pids= awaited=",
    ]
    for process in plan.processes:
        lines += ["", f"# {process.name}", _start(plan, process), 'pids="$pids $!"']
        if process.essential or is_whole:
            lines.append('awaited="$awaited $!"')
    lines += [
        "",
        *_TRAPS,
        f"# Wait for {'all' if is_whole else 'the trainers, then stop the others'}.",
        "# The first failure in this order is the exit code.",
        "code=0",
        'for pid in $awaited; do wait "$pid" || { last=$?; [ $code -ne 0 ] || code=$last; }; done',
        *(() if is_whole else ("kill $pids 2>/dev/null; wait",)),
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _variables(plan: LaunchPlan, request: Request) -> Iterator[str]:
    """Yield what a manifest brings back, and a check that secrets are set."""
    for name, value in request.restored:
        if _is_shell_name(name):
            word = f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
            yield f"{word}  # as in the manifest"
    pairs = [pair for process in plan.processes for pair in process.env.items()]
    hidden = {name for name, value in pairs if secrets.redact(name, value) != value}
    for process in plan.processes:
        hidden |= {word.variable for word in arguments.conceal(process.argv)[1]}
    for name in sorted(hidden):
        if _is_shell_name(name):
            yield f': "${{{name}:?is secret, so its value is not here: export it first}}"'
        else:
            # A shell does not pass on a variable of such a name, so exporting it would not help.
            yield f"# {name!a} is secret, and no name for a shell variable: it is left out"


def _preparation(plan: LaunchPlan) -> Iterator[str]:
    """Yield the commands that make folders, files and links."""
    logs = [f"{plan.run_dir}/{process.log}" for process in plan.processes]
    folders = {path.rpartition("/")[0] for path in [*logs, *plan.files, *plan.links]} - {""}
    yield f"cd {shlex.quote(plan.cwd)} || exit 1"
    for folder in sorted(folders):
        yield f"mkdir -p {shlex.quote(folder)} || exit 1"
    for path, text in sorted(plan.files.items()):
        yield f"printf %s {shlex.quote(text)} >{shlex.quote(path)} || exit 1"
    for path, target in sorted(plan.links.items()):
        yield f"ln -sf {shlex.quote(target)} {shlex.quote(path)} || exit 1"


def _start(plan: LaunchPlan, process: ProcessSpec) -> str:
    """Return the command that starts PROCESS in the background."""
    argv = [shlex.quote(word) for word in process.argv]
    for hidden in arguments.conceal(process.argv)[1]:
        before = shlex.quote(hidden.before) if hidden.before else ""
        argv[hidden.at] = f'{before}"${hidden.variable}"'
    # `env` would take a command with an equals sign in its path for one more variable.
    if "=" in process.argv[0]:
        argv = ["sh", "-c", "'exec \"$@\"'", "sh", *argv]
    if process.cpus:
        argv = ["taskset", "-c", format_ranges(process.cpus, ","), *argv]
    log, errors = (f"{plan.run_dir}/{name}" for name in (process.log, process.error_log))
    redirected = f"2>>{shlex.quote(errors)}" if process.error_log else "2>&1"
    words = [
        "env",
        *(f"-u {shlex.quote(name)}" for name in process.unset),
        *_assignments(process.env),
        " ".join(argv),
        f"</dev/null >>{shlex.quote(log)} {redirected} &",
    ]
    return " \\\n  ".join(words)


def _assignments(env: Mapping[str, str]) -> Iterator[str]:
    for name, value in env.items():
        if secrets.redact(name, value) == value:
            yield f"{shlex.quote(name)}={shlex.quote(value)}"
        elif _is_shell_name(name):
            yield f'{name}="${name}"'


def _is_shell_name(name: str) -> bool:
    return name.isidentifier() and name.isascii()
