"""File descriptors: the three that every process expects, and how many may be open."""

# pathlib costs start-up time.
# ruff: noqa: PTH110, PTH208

from __future__ import annotations

import os
import resource

from fleetrun.errors import EnvironmentFault

# A process has its handle, a reserved port, and a log that is shown.
_EACH = 3
# What else the launcher has open: at least, and with all that it may be asked to do.
_OWN, _SPARE = 20, 64
# Callers of the session that have not introduced themselves; there is room for a few more.
_STRANGERS = 128


def hold_standard() -> None:
    """Fill what is closed of 0, 1 and 2, lest a file of ours becomes some worker's output."""
    for fd in range(3):
        if not os.path.exists(f"/proc/self/fd/{fd}"):
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


class FileLimit:
    """RLIMIT_NOFILE: raised for us as far as PROCESSES and HOSTS may need, left as it was for them.

    Raises EnvironmentFault where that is more than may be had.
    """

    def __init__(self, processes: int, hosts: int = 1) -> None:
        self._before: tuple[int, int] | None = None
        self._raised: tuple[int, int] | None = None
        self._others = _OWN + len(os.listdir("/proc/self/fd"))
        # One of them has a connection to each other; with fewer it turns some away, and says so.
        self._wished = _SPARE + (0 if hosts == 1 else hosts + _STRANGERS)
        self.hold(processes)

    def hold(self, processes: int) -> None:
        """Raise the limit as far as PROCESSES may need, if it is lower."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = processes * _EACH + self._others
        if resource.RLIM_INFINITY != hard < needed:
            raise EnvironmentFault(
                f"{processes} processes on one host need {needed} open files, and {hard} are "
                "allowed: raise the hard limit (`ulimit -Hn`)."
            )
        wanted = needed + self._wished
        if soft != resource.RLIM_INFINITY and soft < wanted:
            new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            self._before, self._raised = self._before or (soft, hard), (new, hard)
            self.lift()

    def lift(self) -> None:
        """Have the raised limit, if it is needed."""
        if self._raised is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._raised)

    def restore(self) -> None:
        """Have the limit that the user set: at the end, and for a process about to be started.

        It may be below what we have open; the new process only opens its standard files.
        """
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._before)
