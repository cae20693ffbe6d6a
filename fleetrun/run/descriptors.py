"""File descriptors: the standard three, and the limit of open files."""

from __future__ import annotations

import os
import resource

from fleetrun.errors import EnvironmentFault

# For each process: its pidfd, a reserved port, and a log that is shown.
_EACH = 3
# What else the launcher opens: at least, and with every option.
_OWN, _SPARE = 20, 64
# Connections that are not authenticated yet; a few more than `session.listener` keeps.
_PENDING = 128


def hold_standard() -> None:
    """Open closed standard descriptors on /dev/null: no other file may get their numbers."""
    for fd in range(3):
        if not os.path.exists(f"/proc/self/fd/{fd}"):
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


class FileLimit:
    """RLIMIT_NOFILE, raised for the launcher as far as PROCESSES and HOSTS need; not for ranks.

    A process needs EACH files; WHAT names them all where they are no ranks. Raises EnvironmentFault
    where that is more than may be had.
    """

    def __init__(
        self,
        processes: int,
        hosts: int = 1,
        *,
        each: int = _EACH,
        what: str = "processes on one host",
    ) -> None:
        self._each, self._what = each, what
        self._before: tuple[int, int] | None = None
        self._raised: tuple[int, int] | None = None
        self._others = _OWN + len(os.listdir("/proc/self/fd"))
        # One of them has a connection to each other; with fewer it turns some away, and says so.
        self._wished = _SPARE + (0 if hosts == 1 else hosts + _PENDING)
        self.hold(processes)

    def hold(self, processes: int) -> None:
        """Raise the limit as far as PROCESSES may need, if it is lower."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = processes * self._each + self._others
        if resource.RLIM_INFINITY != hard < needed:
            raise EnvironmentFault(
                f"{processes} {self._what} need {needed} open files, and {hard} are "
                "allowed: raise the hard limit (`ulimit -Hn`)."
            )
        wanted = needed + self._wished
        if soft != resource.RLIM_INFINITY and soft < wanted:
            new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            self._before, self._raised = self._before or (soft, hard), (new, hard)
            self.lift()

    def lift(self) -> None:
        """Set the raised limit, if it is needed."""
        if self._raised is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._raised)

    def restore(self) -> None:
        """Set the user's limit again: at the end, and for a process about to be started.

        It may be below what is open here; the new process only opens its standard files.
        """
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._before)
