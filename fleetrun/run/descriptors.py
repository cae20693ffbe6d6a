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
        self._raised: tuple[int, int] | None = None
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = processes + _OWN + len(os.listdir("/proc/self/fd"))
        if soft != resource.RLIM_INFINITY and soft < wanted:
            new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            self._before, self._raised = (soft, hard), (new, hard)
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
