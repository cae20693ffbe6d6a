"""Completion by Tab, with click's scripts for bash, zsh and fish, and answers to them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

import click
from click import shell_completion
from click.shell_completion import CompletionItem, ShellComplete

from fleetrun.cli import argv
from fleetrun.cli.option import Option, by_spelling
from fleetrun.cli.options import KNOWN, is_device_list
from fleetrun.cli.parser import COMMANDS, SETTINGS, LaunchCommand, load
from fleetrun.cli.types import FILE, among
from fleetrun.errors import UsageError
from fleetrun.model import flag
from fleetrun.plan import kinds
from fleetrun.printing import put
from fleetrun.rundir.variables import COMPLETE

_PROGRAM = "fleetrun"
Item = CompletionItem[str]


class _Bash(shell_completion.BashComplete):
    """Bash splits words at = and : unlike other shells, and replaces only the last piece."""

    # No blank after KEY=, which a value follows.
    source_template = shell_completion.BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace"
    )
    _cut = 0

    @staticmethod
    def _check_version() -> None:
        """Do not start a bash to ask for its version, as click does."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one to complete, and that one, as they were typed."""
        args, incomplete = super().get_completion_args()
        args, incomplete = _rejoin(args, incomplete)
        self._cut = max(map(incomplete.rfind, "=:")) + 1
        return args, incomplete

    def format_completion(self, item: Item) -> str:
        """Return ITEM as click's script reads it."""
        value = item.value[self._cut :] if item.type == "plain" else item.value
        return f"{item.type},{value}"


SHELLS: dict[str, type[ShellComplete]] = {
    "bash": _Bash,
    "zsh": shell_completion.ZshComplete,
    "fish": shell_completion.FishComplete,
}


def _of(shell: str) -> ShellComplete:
    return SHELLS[shell](click.Command(_PROGRAM), {}, _PROGRAM, COMPLETE)


def script(shell: str) -> str:
    """Return the script for SHELL."""
    lines = _of(shell).source()
    # Also for the other name of the command.
    for register in ("complete -o nosort -F", "compdef"):
        lines = re.sub(rf"(?m)^( *{register} .*\b{_PROGRAM})(?= |$)", rf"\1 {_PROGRAM}x", lines)
    return f"{lines}\n"


def answer(instruction: str) -> int:
    """Answer a shell's INSTRUCTION in click's form: bash_complete, zsh_source."""
    shell, _, task = instruction.partition("_")
    if shell not in SHELLS or task not in {"source", "complete"}:
        raise UsageError(
            f"{COMPLETE}={instruction}: give SHELL_source or SHELL_complete, "
            f"where SHELL is one of {', '.join(SHELLS)}."
        )
    if task == "source":
        return put(script(shell))
    completing = _of(shell)
    args, incomplete = completing.get_completion_args()
    items = candidates(args, incomplete)
    return put("".join(f"{completing.format_completion(item)}\n" for item in items))


def candidates(args: list[str], incomplete: str) -> list[Item]:
    """Return the completions of INCOMPLETE after ARGS.

    >>> [candidate.value for candidate in candidates(["--gpus=0"], "--nproc")]
    ['--nproc_per_node']
    """
    if args and args[0] in COMMANDS:
        command = load(args[0])
        if not isinstance(command, LaunchCommand):
            return _of_command(command, args, incomplete)
        items = _of_launch(args[1:], incomplete, command.rows())
    else:
        items = _of_launch(args, incomplete, KNOWN)
    if items is not None:
        return items
    files = FILE.completions(incomplete)
    return files if args or not incomplete else files + among(COMMANDS, incomplete)


def _of_command(command: click.Command, args: list[str], incomplete: str) -> list[Item]:
    """Return click's completions for COMMAND, which takes no launch."""
    completing = ShellComplete(command, dict(SETTINGS), args[0], COMPLETE)
    items = completing.get_completions(args[1:], incomplete)
    typed, equals, _ = incomplete.partition("=")
    # Shells replace the whole word, and click knows only its value.
    return _after(f"{typed}=", items) if equals and typed.startswith("-") else items


def _of_launch(
    args: Sequence[str], incomplete: str, options: Sequence[Option]
) -> list[Item] | None:
    """Return completions of OPTIONS or of their values; None for a file or the script's words."""
    try:
        head = argv.scan(args, options)
    except UsageError:
        # Complete after an earlier mistake, too; running the line reports it.
        head = argv.ParsedOptions((), (), None)
    if head.script_at is not None or args[-1:] == ["--"]:
        return None
    if head.pending is not None:
        return head.pending.kind.completions(incomplete)
    typed, equals, value = incomplete.partition("=")
    if equals and typed.startswith("--"):
        option = by_spelling(options).get(typed[2:].replace("-", "_"))
        return _after(f"{typed}=", option.kind.completions(value)) if option else []
    return _spellings(incomplete, options) if incomplete.startswith("-") else None


def _after(before: str, items: Iterable[Item]) -> list[Item]:
    return [CompletionItem(f"{before}{item.value}", item.type, item.help) for item in items]


def _spellings(incomplete: str, options: Iterable[Option]) -> list[Item]:
    """Return the options that start with INCOMPLETE, spelled with its kind of hyphens."""
    items = []
    for option in options:
        if option.group == "later":
            continue
        for name in (*option.spellings, *(_of_kinds() if option.label == "devices" else ())):
            spellings = (flag(name), f"--{name}", f"--{name.replace('_', '-')}")
            fitting = [spelling for spelling in spellings if spelling.startswith(incomplete)]
            if fitting:
                items.append(CompletionItem(fitting[0], help=option.help or None))
    return items


def _of_kinds() -> list[str]:
    """Return the options of the known device kinds, and of the exported one."""
    names = dict.fromkeys((*kinds.VENDORS, os.environ.get(kinds.XCCL, "")))
    return [f"{kind}s" for kind in names if is_device_list(f"{kind}s", "all")]


def _rejoin(args: list[str], incomplete: str) -> tuple[list[str], str]:
    """Rejoin the words that bash split at = and :.

    >>> _rejoin(["--master", "a", ":", "1", "--dry-run"], "=")
    (['--master', 'a:1'], '--dry-run=')
    """
    joined: list[str] = []
    glued = False
    for word in (*args, incomplete):
        if joined and (glued or word in ("=", ":")):
            joined[-1] += word
        else:
            joined.append(word)
        glued = word in ("=", ":")
    return joined[:-1], joined[-1]
