"""A rank's log as one stream, including the archives of `--log_max_size`.

Offsets count all that the rank wrote. What was removed with the oldest archives is skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from fleetrun.rundir.outputtimes import LogTimes

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# A rotation is noted within this time; without a note, the file was truncated.
_NOTED_S = 1.0


class LogFile:
    """The log PATH, whose current notes TIMES returns; OSError if it cannot be opened."""

    def __init__(self, path: str, times: Callable[[], LogTimes]) -> None:
        self.path = path
        self._times = times
        self._fd = os.open(path, _OPEN)
        self._size = 0
        # The offset of the file's first byte.
        self._base = 0
        self._cuts = 0
        # Descriptor, begin and end of each archive that is there, the oldest first.
        self._archives: list[tuple[int, int, int]] = []
        self._arrange()

    @property
    def begin(self) -> int:
        """The offset of the oldest byte that still exists."""
        return self._archives[0][1] if self._archives else self._base

    def end(self) -> int:
        """Return the offset after the last byte."""
        size = os.fstat(self._fd).st_size
        if self._is_cut() or size < self._size:
            self._await_cut()
            size = os.fstat(self._fd).st_size
        self._size = size
        return self._base + size

    def written_at(self) -> float:
        """Return the time of the last write, in seconds since 1970."""
        return os.fstat(self._fd).st_mtime

    def read(self, offset: int, length: int) -> bytes:
        """Return at most LENGTH bytes from OFFSET on, which is `begin` or later."""
        while True:
            for fd, begin, end in self._archives:
                if begin <= offset < end:
                    return os.pread(fd, min(length, end - offset), offset - begin)
            size = os.fstat(self._fd).st_size
            content = os.pread(self._fd, length, offset - self._base)
            # Otherwise it was cut meanwhile, and these are other bytes: the file is shorter now, or
            # has grown beyond its old size.
            if not self._is_cut() and self._size <= size <= os.fstat(self._fd).st_size:
                self._size = size
                return content
            self._await_cut()

    def _is_cut(self) -> bool:
        """Whether there is a new cut."""
        return len(self._times().cuts) != self._cuts

    def _await_cut(self) -> None:
        """Rearrange once the notes tell what happened to the file."""
        deadline = time.monotonic() + _NOTED_S
        while not self._is_cut():
            if time.monotonic() > deadline:
                # It was truncated; further output counts after all earlier output.
                self._base += self._size
                self._size = 0
                return
        self._arrange()

    def _arrange(self) -> None:
        """Open the archives, again if they have moved meanwhile."""
        cuts: list[int] | None = None
        while cuts != self._times().cuts:
            cuts = list(self._times().cuts)
            self._forget()
            for number, end in enumerate(reversed(cuts), start=1):
                try:
                    fd = os.open(f"{self.path}.{number}", _OPEN)
                except OSError:
                    break
                begin = cuts[-number - 1] if number < len(cuts) else 0
                self._archives.insert(0, (fd, begin, end))
            self._cuts, self._base = len(cuts), cuts[-1] if cuts else 0
            self._size = os.fstat(self._fd).st_size

    def _forget(self) -> None:
        for fd, _, _ in self._archives:
            os.close(fd)
        self._archives.clear()

    def close(self) -> None:
        """Close all files."""
        self._forget()
        os.close(self._fd)
