"""A rank's log as one stream, including the archives of `--log_max_size`.

Offsets count all that the rank wrote. What was removed with the oldest archives is skipped.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable

from fleetrun.rundir import reading
from fleetrun.rundir.outputtimes import LogTimes

# A rotation is noted within this time; without a note, the file was truncated.
_NOTED_S = 1.0


class LogFile:
    """The log PATH, whose current notes TIMES returns; OSError if it cannot be opened."""

    def __init__(self, path: str, times: Callable[[], LogTimes]) -> None:
        self.path = path
        self._times = times
        self._fd = os.open(path, reading.READING)
        self._size = 0
        # What others have removed from the file.
        self._removed = 0

    @property
    def begin(self) -> int:
        """The offset of the oldest byte that still exists."""
        cuts = self._times().cuts
        kept = 0
        while kept < len(cuts) and os.path.exists(f"{self.path}.{kept + 1}"):
            kept += 1
        if not kept:
            return self._base()
        return cuts[-kept - 1] if kept < len(cuts) else 0

    def end(self) -> int:
        """Return the offset after the last byte."""
        cuts = len(self._times().cuts)
        size = os.fstat(self._fd).st_size
        deadline = time.monotonic() + _NOTED_S
        while size < self._size and len(self._times().cuts) == cuts:
            if time.monotonic() > deadline:
                # It was truncated; further output counts after all earlier output.
                self._removed += self._size
                break
        self._size = os.fstat(self._fd).st_size
        return self._base() + self._size

    def _base(self) -> int:
        """Return the offset of the file's first byte."""
        cuts = self._times().cuts
        return (cuts[-1] if cuts else 0) + self._removed

    def written_at(self) -> float:
        """Return the time of the last write, in seconds since 1970."""
        return os.fstat(self._fd).st_mtime

    def read(self, offset: int, length: int) -> bytes:
        """Return at most LENGTH bytes from OFFSET on, which is `begin` or later."""
        while True:
            cuts = [*self._times().cuts]
            place = bisect_right(cuts, offset)
            if place == len(cuts):
                content = os.pread(self._fd, length, offset - self._base())
            else:
                # Of as many archives as there were cuts, the newest is the first.
                begin = cuts[place - 1] if place else 0
                archive = f"{self.path}.{len(cuts) - place}"
                content = reading.piece(archive, offset - begin, min(length, cuts[place] - offset))
            # Otherwise it was cut meanwhile, and these are other bytes.
            if cuts == self._times().cuts:
                return content

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
