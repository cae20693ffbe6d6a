"""Completion by Tab: click's scripts for bash, zsh and fish, and its answers to them."""

from __future__ import annotations

from click.shell_completion import (
    BashComplete,
    add_completion_class,
    get_completion_class,
    shell_complete,
)

from fleetrun.cli.parser import ROOT
from fleetrun.rundir.variables import COMPLETE


@add_completion_class
class _Bash(BashComplete):
    """Bash splits words at =, and replaces only the last piece."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one to complete, and that one."""
        args, incomplete = super().get_completion_args()
        return [arg for arg in args if arg != "="], incomplete


def script(shell: str) -> str:
    """Return the script for SHELL."""
    complete = get_completion_class(shell)
    assert complete is not None
    return f"{complete(ROOT, {}, 'fleetrun', COMPLETE).source()}\n"


def answer(instruction: str) -> int:
    """Answer a shell's INSTRUCTION in click's form: bash_complete, zsh_source."""
    settings = {"token_normalize_func": lambda name: name.replace("-", "_")}
    return shell_complete(ROOT, settings, "fleetrun", COMPLETE, instruction)
