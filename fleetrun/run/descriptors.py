"""File descriptors: the standard three, and the limit of open files."""

from __future__ import annotations

import os
import resource

from fleetrun.errors import EnvironmentFault

# Per process: its pidfd, a reserved port, and a log on the console.
_PER_PROCESS = 3
# The launcher's other files: at least, and with every option.
_OWN, _SPARE = 20, 64
# Unauthenticated connections; a few more than `session.connecting` keeps.
_PENDING = 128


def hold_standard() -> None:
    """Open closed standard descriptors on /dev/null, so that no other file gets their numbers."""
    for fd in range(3):
        if not os.path.exists(f"/proc/self/fd/{fd}"):
            # This is the lowest free number, so open() returns it.
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


class FileLimit:
    """RLIMIT_NOFILE, raised as far as PROCESSES and HOSTS need it, for the launcher but not ranks.

    A process needs PER_PROCESS files; LABEL names the processes in messages. Raises
    EnvironmentFault if the hard limit is too low.
    """

    def __init__(
        self,
        processes: int,
        hosts: int = 1,
        *,
        per_process: int = _PER_PROCESS,
        label: str = "processes on one host",
    ) -> None:
        soft, hard = self._before = self._raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = processes * per_process + _OWN + len(os.listdir("/proc/self/fd"))
        # The coordinator is connected to every host; with fewer files it turns some away.
        target = needed + _SPARE + (0 if hosts == 1 else hosts + _PENDING)
        if soft == resource.RLIM_INFINITY or soft >= target:
            return
        if resource.RLIM_INFINITY != hard < needed:
            raise EnvironmentFault(
                f"{processes} {label} need {needed} open files, and {hard} are "
                "allowed: raise the hard limit (`ulimit -Hn`)."
            )
        self._raised = target if hard == resource.RLIM_INFINITY else min(target, hard), hard
        self.lift()

    def lift(self) -> None:
        """Set the raised limit, if it is needed."""
        if self._raised != self._before:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._raised)

    def restore(self) -> None:
        """Restore the user's limit: at the end, and for each process that is started."""
        if self._raised != self._before:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._before)
