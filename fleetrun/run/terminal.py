"""Who reads our standard input: a pipe, or the terminal that the launcher is in the foreground of.

Only a process of the terminal's own session and foreground group may read it. So the one process
that has it (the user talks to a prompt or a debugger there) stays in the launcher's own; all others
lead sessions of theirs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.model import LaunchPlan

# What --stdin says when no process is to read it.
NOBODY = "none"


class Stdin(NamedTuple):
    """The process that reads our standard input, and whether that is the terminal."""

    process: int | None
    is_terminal: bool = False


def choose(plan: LaunchPlan, shown: Sequence[int] = (), wanted: str | None = None) -> Stdin:
    """Choose the process of PLAN that reads standard input: as WANTED, or else by what is SHOWN.

    WANTED is a global rank or `none`.
    """
    if wanted == NOBODY or not _is_inherited():
        return Stdin(None)
    trainers = {
        process.rank.rank: index
        for index, process in enumerate(plan.processes)
        if process.rank is not None and process.rank.role == "TRAINER"
    }
    if not os.isatty(0):
        # Only one can read a pipe: the first, unless somebody says another one.
        first = next(iter(trainers.values()), None) if _has_ranks(plan) else 0
        return Stdin(first if wanted is None else trainers.get(int(wanted)))
    if not is_foreground():
        return Stdin(None)
    if wanted is None:
        # What is typed for one of several would stand among the others' lines.
        return Stdin(shown[0] if len(shown) == 1 else None, is_terminal=len(shown) == 1)
    process = trainers.get(int(wanted))
    return Stdin(process, is_terminal=process is not None)


def _has_ranks(plan: LaunchPlan) -> bool:
    return any(process.rank is not None for process in plan.processes)


def _is_inherited() -> bool:
    """Whether descriptor 0 is what we were given, and not what took the number of a closed one."""
    try:
        return os.get_inheritable(0)
    except OSError:
        return False


def is_foreground() -> bool:
    """Whether standard input is our own terminal, and we are in its foreground."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        # Another session's, or none.
        return False


def is_ours() -> bool:
    """Whether a process that we start could read the terminal."""
    return _is_inherited() and os.isatty(0) and is_foreground()


class Settings:
    """How the terminal is set, for when a process dies that has changed it, to ask a password."""

    def __init__(self) -> None:
        import termios  # noqa: PLC0415 - only where there is a terminal to be read

        self._termios = termios
        try:
            self._before: list[object] | None = termios.tcgetattr(0)
        except termios.error:
            self._before = None

    def restore(self, fd: int = 0) -> None:
        """Set the terminal as it was; who is in its background, or not there, leaves it alone."""
        if self._before is None:
            return
        with suppress(self._termios.error, OSError):
            if self._termios.tcgetattr(fd) != self._before:
                # Not when all is drawn: an output that Ctrl-S stopped never is.
                self._termios.tcsetattr(fd, self._termios.TCSANOW, self._before)  # type: ignore[arg-type]
