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

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fleetrun.rundir import reading

SCHEMA = 1
_HEAD = b"fleetrun output.times %d " % SCHEMA
# The fewest words of any other line.
_WORDS = 3
# A run of notes, few enough for their words to take little memory. Longer numbers are invalid.
_NOTES = rb"(?m)(?:^-?\d{1,18} \d{1,9} \d{1,18}\n){1,50000}"


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
        self._is_ours = False
        self._base_ms = 0

    def feed(self, text: bytes) -> None:
        """Parse the whole lines of TEXT; ignore malformed ones."""
        at = 0
        for match in re.finditer(_NOTES, text):
            self._take(text[at : match.start()])
            words = match[0].split()
            self._note(map(int, words[::3]), words[1::3], map(int, words[2::3]))
            at = match.end()
        self._take(text[at:])

    def _note(self, times: Iterable[int], logs: Iterable[bytes], offsets: Iterable[int]) -> None:
        """Parse notes; ignore those about logs without a name."""
        for since, number, offset in zip(times, logs, offsets, strict=True):
            log = self._numbered.get(number)
            if log is None:
                continue
            at = since + self._base_ms
            # Cope with changed clocks and files.
            if log.offsets:
                if offset < log.offsets[-1]:
                    # The log was truncated.
                    log.at_ms.clear()
                    log.offsets.clear()
                elif at < log.at_ms[-1]:
                    at = log.at_ms[-1]
            log.at_ms.append(at)
            log.offsets.append(offset)

    def _take(self, text: bytes) -> None:
        """Parse the lines of TEXT, none of which is a note."""
        for line in text.split(b"\n"):
            words = line.split(b" ")
            if line.startswith(_HEAD):
                base = _number(line[len(_HEAD) :])
                self._is_ours, self._base_ms = base is not None, base or 0
            elif not self._is_ours or len(words) < _WORDS:
                continue
            elif words[0] == b"=":
                name = b" ".join(words[2:]).decode(errors="surrogateescape")
                self._numbered[words[1]] = self.logs.setdefault(name, LogTimes([], [], []))
            elif words[0] == b"/" and words[1] in self._numbered:
                offset = _number(words[2])
                if offset is not None:
                    self._numbered[words[1]].cuts.append(offset)


def _number(word: bytes) -> int | None:
    try:
        return int(word)
    except ValueError:
        return None
