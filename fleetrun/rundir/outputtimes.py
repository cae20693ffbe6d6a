"""`output.times` in the run directory, the growth of the ranks' logs, and a log with archives.

A line is `TIME OFFSET LOG`: when the file LOG of the run directory had OFFSET bytes, in
milliseconds since 1970; or `/ OFFSET LOG`: what LOG had before OFFSET is in archives now. Offsets
count all that was ever written into a log. A last line without an end is none.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fleetrun.rundir import reading


class LogTimes(NamedTuple):
    """The notes about one log, in order: it had `offsets[i]` bytes at `at_ms[i]`."""

    # Milliseconds since 1970.
    at_ms: list[int]
    offsets: list[int]
    # The offsets up to which it was moved to an archive.
    cuts: list[int]

    def offset_at(self, at_ms: float) -> int:
        """Return the offset of the first byte written at AT_MS or later."""
        before = bisect_left(self.at_ms, at_ms)
        return self.offsets[before - 1] if before else 0


def noted(at_ms: int, offset: int, log: str) -> bytes:
    """Return the line of a note."""
    return b"%d %d %b\n" % (at_ms, offset, log.encode(errors="surrogateescape"))


def moved(offset: int, log: str) -> bytes:
    """Return the line of a cut."""
    return b"/ %d %b\n" % (offset, log.encode(errors="surrogateescape"))


class Reader:
    """Reads the file PATH, which may still grow."""

    def __init__(self, path: str) -> None:
        self._file = reading.GrowingFile(path)
        self._logs: dict[str, LogTimes] = {}

    def read(self) -> Mapping[str, LogTimes]:
        """Return the notes about each log so far, by name; empty if unreadable."""
        while text := self._file.read():
            for line in text.split(b"\n")[:-1]:
                match line.split(b" ", 2):
                    case [b"/", offset, name] if offset.isdigit():
                        self._log(name).cuts.append(int(offset))
                    case [at, offset, name] if at.isdigit() and offset.isdigit():
                        log = self._log(name)
                        # The clock may have been set back.
                        log.at_ms.append(max([int(at), *log.at_ms[-1:]]))
                        log.offsets.append(int(offset))
                    case _:
                        continue
        return self._logs

    def _log(self, name: bytes) -> LogTimes:
        decoded = name.decode(errors="surrogateescape")
        return self._logs.setdefault(decoded, LogTimes([], [], []))


class LogFile:
    """The log PATH as one stream, with the archives of `--log_max_size` that still exist.

    TIMES returns its current notes. Raises OSError if it cannot be opened.
    """

    def __init__(self, path: str, times: Callable[[], LogTimes]) -> None:
        self.path = path
        self._times = times
        self._fd = os.open(path, reading.READING)

    @property
    def begin(self) -> int:
        """The offset of the oldest byte that still exists."""
        cuts = [0, *self._times().cuts]
        kept = 0
        while kept < len(cuts) - 1 and os.path.exists(f"{self.path}.{kept + 1}"):
            kept += 1
        return cuts[-kept - 1]

    def end(self) -> int:
        """Return the offset after the last byte."""
        return [0, *self._times().cuts][-1] + os.fstat(self._fd).st_size

    def written_at(self) -> float:
        """Return the time of the last write, in seconds since 1970."""
        return os.fstat(self._fd).st_mtime

    def read(self, offset: int, length: int) -> bytes:
        """Return at most LENGTH bytes from OFFSET on, which is `begin` or later."""
        while True:
            cuts = [0, *self._times().cuts]
            place = bisect_right(cuts, offset)
            if place == len(cuts):
                content = os.pread(self._fd, length, offset - cuts[-1])
            else:
                # Of as many archives as there were cuts, the newest is the first.
                archive = f"{self.path}.{len(cuts) - place}"
                most = min(length, cuts[place] - offset)
                content = reading.piece(archive, offset - cuts[place - 1], most)
            # Otherwise it was cut meanwhile, and these are other bytes.
            if len(cuts) == 1 + len(self._times().cuts):
                return content

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
