"""File descriptors: the three that every process expects, and how many may be open."""

# pathlib costs start-up time.
# ruff: noqa: PTH110, PTH208

from __future__ import annotations

import os
import resource

# What the launcher has open beside one descriptor for each process.
_OWN = 64


def hold_standard() -> None:
    """Fill what is closed of 0, 1 and 2, lest a file of ours becomes some worker's output."""
    for fd in range(3):
        if not os.path.exists(f"/proc/self/fd/{fd}"):
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


class FileLimit:
    """RLIMIT_NOFILE, raised for us when PROCESSES need it, and left as it was for them."""

    def __init__(self, processes: int) -> None:
        self._before: tuple[int, int] | None = None
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = processes + _OWN + len(os.listdir("/proc/self/fd"))
        if soft != resource.RLIM_INFINITY and soft < wanted:
            new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
            self._before = (soft, hard)

    def give_back_to(self, pid: int) -> None:
        """Let the new process PID have the limit that the user set."""
        if self._before is not None:
            try:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, self._before)
            except (ProcessLookupError, PermissionError):
                # It ended already, or became another user.
                return

    def restore(self) -> None:
        """Let us have it again, too."""
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._before)
