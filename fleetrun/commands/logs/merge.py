"""Merges the lines of several logs in the order of their output, each with its prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from fleetrun.commands.logs.clean import cleaned

# Bytes that are read, or written, at a time.
_CHUNK = 1024 * 1024
# The most pieces that are joined: a generator's step per line would take as long as the rest.
_PIECES = 1000
# Text that a rank has overwritten on its line, as progress bars do.
_OVERWRITTEN = re.compile(rb"[^\r\n]*\r(?=[^\r\n])")


class MergedLog(Protocol):
    """The log that is read: see rundir/logfile.py."""

    @property
    def begin(self) -> int: ...  # noqa: D102

    def read(self, offset: int, length: int) -> bytes: ...  # noqa: D102


class Stream:
    """The lines of LOG from the offset AT on, with PREFIX; only those that PATTERN matches.

    Without a prefix, overwritten text of progress bars stays. IS_CLEAN: without escape sequences.
    """

    def __init__(
        self,
        log: MergedLog,
        *,
        at: int = 0,
        prefix: bytes = b"",
        pattern: re.Pattern[bytes] | None,
        is_clean: bool = False,
    ) -> None:
        self._log = log
        # The offset of the next line, and the bytes read from there.
        self.at = max(at, log.begin)
        self._ahead = b""
        self._ahead_at = self.at
        # Lines are shown as they were read.
        self._is_simple = False
        self._prefix = prefix
        self._pattern = pattern
        self._is_clean = is_clean

    def lines(self, until: int) -> Iterator[bytes]:
        """Yield the lines that end before UNTIL, many at a time."""
        while self.at < until and (piece := self.take(until)) is not None:
            if piece:
                yield piece

    def take(self, until: int) -> bytes | None:
        """Return lines that end before UNTIL, as far as they are read; None if there are none."""
        begin = self.at - self._ahead_at
        while True:
            end = self._ahead.rfind(b"\n", begin, until - self._ahead_at) + 1
            if end:
                self.at = self._ahead_at + end
                if self._is_simple and self._ahead.find(b"\n", begin) == end - 1:
                    # The usual case if each of a million lines has a note.
                    return self._prefix + self._ahead[begin:end]
                return self._shown(self._ahead[begin:end])
            have = self._ahead_at + len(self._ahead)
            if have >= until:
                # The line continues beyond UNTIL.
                return None
            piece = self._log.read(have, _CHUNK)
            if not piece:
                return None
            self._ahead, self._ahead_at = self._ahead[begin:] + piece, self.at
            self._is_simple = not (self._pattern or self._is_clean or b"\r" in self._ahead)
            begin = 0

    def rest(self, until: int) -> bytes:
        """Return the rest before UNTIL as a line, complete or not."""
        body = b""
        while self.at < until and (piece := self._log.read(self.at, until - self.at)):
            self.at += len(piece)
            body += piece
        self._ahead, self._ahead_at = b"", self.at
        return self._shown(body + b"\n") if body.strip(b"\r\n") else b""

    def _shown(self, body: bytes) -> bytes:
        if self._is_clean:
            body = cleaned(body)
        if b"\r" in body and self._prefix:
            body = _OVERWRITTEN.sub(b"", body)
        if self._pattern is not None:
            matches = self._pattern.search
            matching = [line for line in body[:-1].split(b"\n") if matches(line)]
            body = b"\n".join(matching) + b"\n" if matching else b""
        if not self._prefix or not body:
            return body
        between = b"\n" + self._prefix
        return self._prefix + body.replace(b"\n", between, body.count(b"\n") - 1)


def history(
    streams: Sequence[Stream],
    notes: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> Iterator[bytes]:
    """Yield the lines of STREAMS in the order of their NOTES: times and offsets of each.

    Lines within the same note of a log stay together.
    """
    marks = [
        (at, place, offset)
        for place, noted in enumerate(notes)
        for at, offset in zip(*noted, strict=True)
    ]
    # The notes of each log are sorted already, which makes this cheap.
    marks.sort()
    # A sentinel, so that the last note counts.
    marks.append((0, -1, -1))
    pieces: list[bytes] = []
    size = 0
    place = until = -1
    for _, next_place, offset in marks:
        # Of consecutive notes of one log only the last counts.
        if next_place != place and place >= 0:
            stream = streams[place]
            while stream.at < until and (piece := stream.take(until)) is not None:
                pieces.append(piece)
                size += len(piece)
            if size >= _CHUNK or len(pieces) >= _PIECES:
                yield b"".join(pieces)
                pieces.clear()
                size = 0
        place, until = next_place, offset
    yield b"".join(pieces)


def joined(pieces: Iterator[bytes], write: Callable[[bytes], None]) -> None:
    """Write PIECES, many at a time."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _CHUNK:
            write(b"".join(waiting))
            waiting.clear()
            size = 0
    write(b"".join(waiting))
