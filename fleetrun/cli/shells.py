"""Completion by Tab, with click's scripts for bash, zsh and fish, and answers to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import click
from click import shell_completion
from click.shell_completion import CompletionItem, ShellComplete

from fleetrun.cli import argv
from fleetrun.cli.option import Option, by_spelling
from fleetrun.cli.options import KNOWN
from fleetrun.cli.parser import COMMANDS, SETTINGS, LaunchCommand, load, rows
from fleetrun.cli.types import FILE, among
from fleetrun.errors import UsageError
from fleetrun.model import flag
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
        args, last = super().get_completion_args()
        # `--a`, `=` and `b` were typed as one word.
        words = re.sub(r"\0([=:])(?:\0|$)", r"\1", "\0".join((*args, last))).split("\0")
        self._cut = max(map(words[-1].rfind, "=:")) + 1
        return words[:-1], words[-1]

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
    items = candidates(*completing.get_completion_args())
    return put("".join(f"{completing.format_completion(item)}\n" for item in items))


def candidates(args: list[str], incomplete: str) -> list[Item]:
    """Return the completions of INCOMPLETE after ARGS.

    >>> [candidate.value for candidate in candidates(["--gpus=0"], "--nproc")]
    ['--nproc_per_node']
    """
    typed, equals, value = incomplete.partition("=")
    # Shells replace the whole word.
    before = f"{typed}=" if equals and typed.startswith("-") else ""
    own: Sequence[Option] = ()
    words = among(COMMANDS, incomplete) if incomplete and not args else []
    if args and args[0] in COMMANDS:
        command = load(args[0])
        if not isinstance(command, LaunchCommand):
            completing = ShellComplete(command, dict(SETTINGS), args[0], COMPLETE)
            items = completing.get_completions(args[1:], incomplete)
            return [CompletionItem(f"{before}{item.value}", item.type, item.help) for item in items]
        own, args = rows(command), args[1:]
    options = (*own, *KNOWN)
    try:
        head = argv.scan(args, options)
    except UsageError:
        # Complete after an earlier mistake, too; running the line reports it.
        head = argv.ParsedCommand(())
    if head.pending is not None:
        return head.pending.kind.shell_complete(None, None, incomplete)
    if head.script_at is None and args[-1:] != ["--"] and incomplete.startswith("-"):
        if not before:
            return list(_spellings(incomplete, options))
        option = by_spelling(options).get(typed[2:].replace("-", "_"))
        items = option.kind.shell_complete(None, None, value) if option else []
        return [CompletionItem(f"{before}{item.value}", item.type, item.help) for item in items]
    return FILE.shell_complete(None, None, incomplete) + words


def _spellings(incomplete: str, options: Sequence[Option]) -> Iterator[Item]:
    """Yield the options that start with INCOMPLETE, spelled with its kind of hyphens."""
    for option in options:
        for name in option.spellings:
            spellings = (flag(name), f"--{name}", f"--{name.replace('_', '-')}")
            fitting = [spelling for spelling in spellings if spelling.startswith(incomplete)]
            if fitting and option.group != "later":
                yield CompletionItem(fitting[0], help=option.help or None)
