"""A rank's log as one stream, including the archives of `--log_max_size`.

Offsets count all that the rank wrote. What was removed with the oldest archives is skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from fleetrun.rundir import outputtimes

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# A rotation is noted within this time; without a note, the file was truncated.
_NOTED_S = 1.0


class LogFile:
    """The log PATH, whose current notes TIMES returns; OSError if it cannot be opened."""

    def __init__(self, path: str, times: Callable[[], outputtimes.LogTimes]) -> None:
        self.path = path
        self._times = times
        self._fd = os.open(path, _OPEN)
        self._size = 0
        # The offset of the file's first byte, and where the file takes over from the archives.
        self._base = self._moved = 0
        self._cuts = 0
        # Descriptor, begin and end of each archive that is there, the oldest first.
        self._archives: list[tuple[int, int, int]] = []
        self._arrange()

    @property
    def begin(self) -> int:
        """The offset of the oldest byte that still exists."""
        return self._archives[0][1] if self._archives else self._moved

    def end(self) -> int:
        """Return the offset after the last byte."""
        status = os.fstat(self._fd)
        if self._is_cut() or status.st_size < self._size:
            self._await_cut()
            status = os.fstat(self._fd)
        self._size = status.st_size
        return self._base + status.st_size

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
                self._base = self._moved = self._base + self._size
                self._size = 0
                return
        self._arrange()

    def _arrange(self) -> None:
        """Open the archives, and determine the offsets of the file."""
        while True:
            cuts = self._times().cuts
            self._forget()
            before = 0
            bounds: list[tuple[int, int]] = []
            for cut in cuts:
                bounds.append((before, cut.offset))
                before = cut.offset
            for number, (begin, end) in enumerate(reversed(bounds), start=1):
                try:
                    fd = os.open(f"{self.path}.{number}", _OPEN)
                except OSError:
                    break
                self._archives.insert(0, (fd, begin, end))
            size = os.fstat(self._fd).st_size
            # Otherwise they have moved while they were opened.
            if len(self._times().cuts) == len(cuts):
                break
        self._cuts = len(cuts)
        self._moved = before
        self._base = before if cuts and cuts[-1].is_collapsed else 0
        self._size = size

    def _forget(self) -> None:
        for fd, _, _ in self._archives:
            os.close(fd)
        self._archives.clear()

    def close(self) -> None:
        """Close all files."""
        self._forget()
        os.close(self._fd)
