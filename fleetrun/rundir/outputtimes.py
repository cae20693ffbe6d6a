"""`output.times` in the run directory: the growth of the ranks' logs.

A line is `TIME OFFSET LOG`: when the file LOG of the run directory had OFFSET bytes, in
milliseconds since 1970. A smaller offset than before means that --log_max_size has cut the log. A
last line without an end is none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.rundir import reading


class LogTimes(NamedTuple):
    """The notes about one log, in order: it had `offsets[i]` bytes at `at_ms[i]`."""

    # Milliseconds since 1970.
    at_ms: list[int]
    offsets: list[int]

    def offset_at(self, at_ms: float) -> int:
        """Return the offset of the first byte written at AT_MS or later."""
        before = bisect_left(self.at_ms, at_ms)
        return self.offsets[before - 1] if before else 0


def noted(at_ms: int, offset: int, log: str) -> bytes:
    """Return the line of a note."""
    return b"%d %d %b\n" % (at_ms, offset, log.encode(errors="surrogateescape"))


class Reader:
    """Reads the file PATH, which may still grow."""

    def __init__(self, path: str) -> None:
        self._file = reading.GrowingFile(path)
        self._logs: dict[str, LogTimes] = {}

    def read(self) -> Mapping[str, LogTimes]:
        """Return the notes about each log so far, by name; empty if unreadable."""
        while text := self._file.read():
            for line in text.split(b"\n")[:-1]:
                at, offset, name = (*line.split(b" ", 2), b"", b"")[:3]
                if not (at.isdigit() and offset.isdigit()):
                    continue
                log = self._logs.setdefault(name.decode(errors="surrogateescape"), LogTimes([], []))
                if log.offsets and int(offset) < log.offsets[-1]:
                    log.at_ms.clear()
                    log.offsets.clear()
                # The clock may have been set back.
                log.at_ms.append(max([int(at), *log.at_ms[-1:]]))
                log.offsets.append(int(offset))
        return self._logs
