"""Which process reads standard input: a pipe, or the launcher's terminal.

Only the foreground process group of the terminal's session may read it. So the one process that
reads it, for a prompt or a debugger, stays in the launcher's group; all others lead sessions.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Sequence
from contextlib import suppress

from fleetrun.model import LaunchPlan


def choose(plan: LaunchPlan, shown: Sequence[int], group: int) -> int | None:
    """Return the process of PLAN that reads standard input, if any.

    GROUP is the keeper's, which has the terminal. A pipe goes to the first process, a terminal to
    the only one that is SHOWN: with several, input would be echoed among the others' lines.
    """
    if not _is_inherited():
        return None
    if os.isatty(0):
        return shown[0] if len(shown) == 1 and is_foreground(group) else None
    has_ranks = any(process.rank is not None for process in plan.processes)
    return next(iter(plan.trainers.values()), None) if has_ranks else 0


def _is_inherited() -> bool:
    """Whether descriptor 0 was inherited; otherwise it was closed and its number reused."""
    try:
        return os.get_inheritable(0)
    except OSError:
        return False


def is_foreground(group: int) -> bool:
    """Whether standard input is this session's terminal, with GROUP in front."""
    try:
        return os.tcgetpgrp(0) == group
    except OSError:
        # The terminal of another session, or no terminal.
        return False


def is_own() -> bool:
    """Whether standard input is this session's terminal, which a child can read."""
    return _is_inherited() and is_foreground(os.getpgrp())


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
        with suppress(OSError):
            # This fails if the keeper led the session, which has lost the terminal with it.
            if os.tcgetpgrp(0) != group:
                return
        with suppress(OSError, termios.error):
            if self._before is not None and termios.tcgetattr(0) != self._before:
                # Not after draining (TCSADRAIN): output that Ctrl-S has stopped never drains.
                termios.tcsetattr(0, termios.TCSANOW, self._before)  # type: ignore[arg-type]
