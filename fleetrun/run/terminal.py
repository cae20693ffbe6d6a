"""Which process reads standard input: a pipe, or the launcher's terminal.

Only the foreground process group of the terminal's session may read it. So the one process that
reads it, for a prompt or a debugger, stays in the launcher's group; all others lead sessions.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from fleetrun.model import LaunchPlan
from fleetrun.run import proc

# The value of --stdin for which no process reads it.
NO_PROCESS = "none"


class Stdin(NamedTuple):
    """The process that reads standard input, and whether that is the terminal."""

    process: int | None
    is_terminal: bool = False


def choose(
    plan: LaunchPlan,
    shown: Sequence[int] = (),
    rank: str | None = None,
    *,
    group: int | None = None,
) -> Stdin:
    """Choose the process of PLAN that reads standard input: global RANK (`none`: nobody).

    GROUP is the keeper's, which has the terminal. Without RANK, a pipe goes to the first process, a
    terminal to the only one that is SHOWN.
    """
    if rank == NO_PROCESS or not _is_inherited():
        return Stdin(None)
    trainers = plan.trainers
    if not os.isatty(0):
        # Only one process can read a pipe.
        has_ranks = any(process.rank is not None for process in plan.processes)
        first = next(iter(trainers.values()), None) if has_ranks else 0
        return Stdin(first if rank is None else trainers.get(int(rank)))
    if not is_foreground(group):
        return Stdin(None)
    if rank is None:
        # With several, input would be echoed among the others' lines.
        return Stdin(shown[0] if len(shown) == 1 else None, is_terminal=len(shown) == 1)
    process = trainers.get(int(rank))
    return Stdin(process, is_terminal=process is not None)


def _is_inherited() -> bool:
    """Whether descriptor 0 was inherited; otherwise it was closed and its number reused."""
    try:
        return os.get_inheritable(0)
    except OSError:
        return False


def is_foreground(group: int | None = None) -> bool:
    """Whether standard input is this session's terminal, with GROUP (None: ours) in front."""
    try:
        return os.tcgetpgrp(0) == (group or os.getpgrp())
    except OSError:
        # The terminal of another session, or no terminal.
        return False


def is_own() -> bool:
    """Whether standard input is this session's terminal, which a child can read."""
    return _is_inherited() and os.isatty(0) and is_foreground()


class TerminalSettings:
    """The terminal's settings, restored after a process that has changed them was killed."""

    def __init__(self) -> None:
        self._before: list[object] | None = None
        with suppress(OSError, termios.error):
            # This fails unless it is this session's terminal.
            os.tcgetpgrp(0)
            self._before = termios.tcgetattr(0)

    def restore(self, group: int) -> None:
        """Restore the settings, unless a shell with its own has taken the terminal from GROUP."""
        if self._before is None or _is_taken(group):
            return
        with suppress(OSError, termios.error):
            if termios.tcgetattr(0) != self._before:
                # Not after draining (TCSADRAIN): output that Ctrl-S has stopped never drains.
                termios.tcsetattr(0, termios.TCSANOW, self._before)  # type: ignore[arg-type]


def _is_taken(group: int) -> bool:
    try:
        return os.tcgetpgrp(0) != group
    except OSError:
        # The keeper led the session, which has lost the terminal with it.
        return False


def has_shell(keeper: int) -> bool:
    """Whether a shell could continue the group of KEEPER: who started it is in its session.

    Nobody is for `ssh -t HOST fleetrun ...`, or for the first process of a container.
    """
    pid = keeper
    with suppress(OSError):
        group = os.getpgid(keeper)
        while os.getpgid(pid) == group and (stat := proc.stat(pid)) is not None:
            pid = stat.parent
        return pid > 0 and os.getsid(pid) == os.getsid(keeper)
    return False
