"""`output.times` in the run directory: the growth of the ranks' logs, for merging them.

Lines of words. The first is `fleetrun output.times 1 BASE`; BASE and all times are in milliseconds,
BASE since 1970, the others since BASE. Offsets count all that was written into a log, also what
`--log_max_size` has moved to its archives.

- `= LOG NAME`: LOG is the number of the file NAME of the run directory from here on.
- `TIME LOG OFFSET`: LOG had OFFSET bytes when it was last written to before a look, at TIME.
- `/ LOG OFFSET`: what LOG had before OFFSET is in archives now, and the file begins with OFFSET.

A last line without an end is none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.rundir import reading

SCHEMA = 1
_HEAD = b"fleetrun output.times %d " % SCHEMA
# The words of any other line, of which the last may have blanks.
_WORDS = 3
_DIGITS = 19


class LogTimes(NamedTuple):
    """The notes about one log, in order: it had `offsets[i]` bytes at `at_ms[i]`."""

    # Milliseconds since 1970.
    at_ms: list[int]
    offsets: list[int]
    # The offsets up to which it was moved to an archive.
    cuts: list[int]

    def offset_at(self, at_ms: float) -> int:
        """Return the offset of the first byte written at AT_MS or later.

        >>> LogTimes([1000, 2000], [10, 30], []).offset_at(1500)
        10
        """
        before = bisect_left(self.at_ms, at_ms)
        return self.offsets[before - 1] if before else 0


def head(base_ms: int) -> bytes:
    """Return the first line."""
    return b"%b%d\n" % (_HEAD, base_ms)


def named(log: int, name: str) -> bytes:
    """Return the line that gives the file NAME its number."""
    return b"= %d %b\n" % (log, name.encode(errors="surrogateescape"))


def noted(at_ms: int, log: int, offset: int) -> bytes:
    """Return the line of a note; AT_MS counts from the file's base."""
    return b"%d %d %d\n" % (at_ms, log, offset)


def moved(log: int, offset: int) -> bytes:
    """Return the line of a cut."""
    return b"/ %d %d\n" % (log, offset)


class Reader:
    """Reads the file PATH, which may still grow."""

    def __init__(self, path: str) -> None:
        self._file = reading.GrowingFile(path)
        self._notes = Notes()

    def read(self) -> Mapping[str, LogTimes]:
        """Return the notes about each log so far, by name; empty if unreadable."""
        while text := self._file.read():
            self._notes.feed(text)
        return self._notes.logs


class Notes:
    r"""The notes about each log.

    >>> notes = Notes()
    >>> notes.feed(b"fleetrun output.times 1 1000\n= 0 workerlog.0\n20 0 7\nbroken\n")
    >>> notes.logs
    {'workerlog.0': LogTimes(at_ms=[1020], offsets=[7], cuts=[])}
    """

    def __init__(self) -> None:
        self.logs: dict[str, LogTimes] = {}
        self._numbered: dict[bytes, LogTimes] = {}
        # None: what was read is no such file.
        self._base_ms: int | None = None

    def feed(self, text: bytes) -> None:
        """Parse the whole lines of TEXT; ignore malformed ones, and those about unknown logs."""
        for line in text.split(b"\n")[:-1]:
            words = line.split(b" ", 2)
            if line.startswith(_HEAD):
                self._base_ms = _number(line[len(_HEAD) :])
            elif self._base_ms is None or len(words) < _WORDS:
                continue
            elif words[0] == b"=":
                name = words[2].decode(errors="surrogateescape")
                self._numbered[words[1]] = self.logs.setdefault(name, LogTimes([], [], []))
            elif words[1] in self._numbered and (offset := _number(words[2])) is not None:
                log, at = self._numbered[words[1]], _number(words[0])
                if words[0] == b"/":
                    log.cuts.append(offset)
                elif at is not None:
                    _note(log, at + self._base_ms, offset)


def _note(log: LogTimes, at_ms: int, offset: int) -> None:
    """Add that LOG had OFFSET bytes at AT_MS; cope with changed clocks and files."""
    if log.offsets and offset < log.offsets[-1]:
        # The log was truncated.
        log.at_ms.clear()
        log.offsets.clear()
    log.at_ms.append(max(at_ms, log.at_ms[-1]) if log.at_ms else at_ms)
    log.offsets.append(offset)


def _number(word: bytes) -> int | None:
    """Return the number that WORD is, if it is one that times and sizes may be."""
    is_number = word.removeprefix(b"-").isdigit() and len(word) <= _DIGITS
    return int(word) if is_number else None
