"""Completion by Tab: click's scripts for bash, zsh and fish, and its answers to them."""

from __future__ import annotations

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
)

from fleetrun.cli.options import KNOWN
from fleetrun.cli.parser import COMMANDS, load
from fleetrun.cli.types import Item, among
from fleetrun.errors import UsageError
from fleetrun.printing import put
from fleetrun.rundir.variables import COMPLETE


class _Bash(BashComplete):
    """Bash splits words at =, and replaces only the last piece."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one to complete, and that one."""
        args, incomplete = super().get_completion_args()
        return [arg for arg in args if arg != "="], incomplete


class _WholeWords(ShellComplete):
    """Answers shells that replace the whole word `--option=value`."""

    def get_completions(self, args: list[str], incomplete: str) -> list[Item]:
        """Return the completions of INCOMPLETE after ARGS."""
        name, equals, _ = incomplete.partition("=")
        before = f"{name}=" if equals and name.startswith("-") else ""
        items = super().get_completions(args, incomplete)
        return [CompletionItem(f"{before}{item.value}", item.type, item.help) for item in items]


class _Zsh(_WholeWords, ZshComplete):
    pass


class _Fish(_WholeWords, FishComplete):
    pass


SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


class _CompletedLaunch(click.Command):
    """The options of a launch; what follows the script is the script's."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Item]:
        """Return the options, or else files and commands, that start with INCOMPLETE."""
        if incomplete.startswith("-") and not ctx.args:
            return super().shell_complete(ctx, incomplete)
        words = among(COMMANDS, incomplete) if incomplete and not ctx.args else []
        return [CompletionItem(incomplete, type="file"), *words]


class _CompletedCommands(click.Group):
    """The commands, and a launch in place of a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let what is no command be a launch."""
        return super().parse_args(ctx, args if args[:1] and args[0] in COMMANDS else ["", *args])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Return the command CMD_NAME, or the launch."""
        del ctx
        settings = {
            "allow_interspersed_args": False,
            "allow_extra_args": True,
            "token_normalize_func": lambda name: name.replace("-", "_"),
        }
        options = [option for option in KNOWN if option.group != "later"]
        launch = _CompletedLaunch("launch", params=list(options), context_settings=settings)
        return load(cmd_name) if cmd_name in COMMANDS else launch


def _of(shell: str) -> ShellComplete:
    return SHELLS[shell](_CompletedCommands("fleetrun"), {}, "fleetrun", COMPLETE)


def script(shell: str) -> str:
    """Return the script for SHELL."""
    return f"{_of(shell).source()}\n"


def answer(instruction: str) -> int:
    """Answer a shell's INSTRUCTION in click's form: bash_complete, zsh_source."""
    shell, _, task = instruction.partition("_")
    if shell not in SHELLS or task not in {"source", "complete"}:
        raise UsageError(
            f"{COMPLETE}={instruction}: give SHELL_source or SHELL_complete, "
            f"where SHELL is one of {', '.join(SHELLS)}."
        )
    return put(script(shell) if task == "source" else f"{_of(shell).complete()}\n")
