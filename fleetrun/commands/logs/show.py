"""Shows logs unchanged or merged in the order of their output, and follows them."""

from __future__ import annotations

import io
import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import repeat
from typing import Any, NamedTuple

from fleetrun.printing import remark, write
from fleetrun.rundir import names, outputtimes, runs
from fleetrun.rundir.outputtimes import LogFile, LogTimes

# Bytes that are read, or written, at a time.
_CHUNK = 1 << 20
_PACE_S = 0.1
_LONGEST_LINE = 65536
# Cyan, yellow, green, magenta, blue; red means failure.
_COLORS = (36, 33, 32, 35, 34)
# Text that a rank has overwritten on its line, as progress bars do.
_OVERWRITTEN = re.compile(rb"[^\r\n]*\r(?=[^\r\n])")
# ECMA-48: control sequences, strings (such as a title, to their end or the end of the line), other
# escapes, and control characters except tab, newline and return. C1 in UTF-8.
_ACTS = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
    rb"|\xc2[\x80-\x9f]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
# An incomplete sequence at the end of what has been read.
_BEGUN = re.compile(rb"(?:\xc2|\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)?)\Z")


def cleaned(text: bytes) -> bytes:
    r"""Return TEXT without control sequences: colours, titles, cursor moves, bells.

    >>> cleaned(b"\x1b[1;31mloss\x1b[0m \x1b]0;title\x07is 3\r\n")
    b'loss is 3\r\n'
    """
    return _ACTS.sub(b"", text)


class LogFilter(NamedTuple):
    """The parts of each log to show."""

    pattern: re.Pattern[bytes] | None = None
    # Wall clock, in seconds; None: from the beginning.
    since: float | None = None
    is_coloured: bool = False
    # Whether the prefix shows the attempt.
    tells_attempt: bool = True
    # Whether control sequences are removed.
    is_clean: bool = False
    # Show only this many bytes at the end of each file; None: all.
    most_bytes: int | None = None


class _Written(io.RawIOBase):
    """What is written to FILE from the offset AT on."""

    def __init__(self, file: LogFile, at: int) -> None:
        self._file = file
        self._at = at

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - any buffer
        piece = self._file.read(self._at, len(buffer))
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


class Stream:
    """The output in FILE from the offset AT on, as FILTER shows it.

    It comes in whole lines with PREFIX, or unchanged (IS_RAW).
    """

    def __init__(
        self,
        file: LogFile,
        times: Callable[[], LogTimes],
        log_filter: LogFilter,
        *,
        at: int,
        prefix: bytes,
        is_raw: bool,
    ) -> None:
        self.file = file
        self.at = at
        self._times = times
        self._filter = log_filter
        self._prefix = prefix
        self._is_raw = is_raw
        self._input = io.BufferedReader(_Written(file, at), _CHUNK)
        # The beginning of a line, or of an escape sequence.
        self._begun = b""

    def growth(self, place: int, *, is_alone: bool) -> Iterator[tuple[int, int, int]]:
        """Yield when the file had grown since the last `take`, in milliseconds, PLACE, and its end.

        IS_ALONE: the times do not matter.
        """
        end = self.file.end()
        written_ms = int(self.file.written_at() * 1000)
        times = self._times()
        first = bisect_right(times.offsets, self.at)
        if times.offsets[first:] and not is_alone:
            yield from zip(times.at_ms[first:], repeat(place), times.offsets[first:])
            written_ms = max(written_ms, times.at_ms[-1])
        # Not noted yet, or never: the launcher was killed, or the disk is full.
        yield written_ms, place, end

    def take(self, until: int) -> Iterator[bytes]:
        """Yield what ends before the offset UNTIL, or as far as it is written."""
        while self.at < until and (piece := self._input.read(min(until - self.at, _CHUNK))):
            self.at += len(piece)
            body = self._begun + piece
            end = body.rfind(b"\n") + 1
            if self._is_raw:
                begun = _BEGUN.search(body) if self._filter.is_clean else None
                end = len(body) if begun is None else begun.start()
            self._begun = body[end:]
            yield self._shown(body[:end])

    def rest(self) -> bytes:
        """Return the beginning of a line that has no end."""
        body, self._begun = self._begun, b""
        if self._is_raw:
            return self._shown(body)
        return self._shown(body + b"\n") if body.strip(b"\r") else b""

    def _shown(self, body: bytes) -> bytes:
        if self._filter.is_clean:
            body = cleaned(body)
        if self._is_raw or not body:
            return body
        if self._prefix and b"\r" in body:
            body = _OVERWRITTEN.sub(b"", body)
        if self._filter.pattern is not None:
            matches = self._filter.pattern.search
            matching = [line for line in body[:-1].split(b"\n") if matches(line)]
            body = b"\n".join(matching) + b"\n" if matching else b""
        if not self._prefix or not body:
            return body
        return self._prefix + body[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n"


class Viewer:
    """Shows by OUT the logs that CHOOSE selects of the runs CHOSEN.

    IS_PREFIXED: each line begins with its rank; None: if there are several logs.
    """

    def __init__(
        self,
        chosen: Sequence[runs.Run],
        choose: Callable[[Sequence[runs.Run]], list[runs.LogRecord]],
        log_filter: LogFilter,
        *,
        is_prefixed: bool | None = None,
        out: Callable[[bytes], None] = write,
    ) -> None:
        self._runs = list(chosen)
        self._choose = choose
        self._filter = log_filter
        self._is_prefixed = is_prefixed
        self._out = out
        self._reader = runs.RunReader()
        self._times: dict[str, outputtimes.Reader] = {}
        # By path; None: it cannot be read.
        self._streams: dict[str, Stream | None] = {}

    def show(self, *, follows: bool = False) -> int:
        """Show the logs and return their number; FOLLOWS: until the launchers have ended."""
        is_over = False
        while not is_over:
            # Checked first, so that the last look sees everything.
            is_over = not (follows and any(run.is_running for run in self._runs))
            if self._streams:
                self._runs = [self._reader.read(run.path) for run in self._runs]
            self._open(self._choose(self._runs))
            self._put(self._news(is_last=is_over))
            if not is_over:
                time.sleep(_PACE_S)
        shown = [stream for stream in self._streams.values() if stream is not None]
        for stream in shown:
            stream.file.close()
        return len(shown)

    def _news(self, *, is_last: bool) -> Iterator[bytes]:
        """Yield new output in the order in which it came; if IS_LAST also unfinished lines."""
        streams = [stream for stream in self._streams.values() if stream is not None]
        growths = [
            stream.growth(place, is_alone=len(streams) == 1) for place, stream in enumerate(streams)
        ]
        for _, place, until in merge(*growths):
            yield from streams[place].take(until)
        if is_last:
            yield from (stream.rest() for stream in streams)

    def _put(self, pieces: Iterator[bytes]) -> None:
        """Write PIECES, many at a time."""
        waiting = bytearray()
        for piece in pieces:
            waiting += piece
            if len(waiting) >= _CHUNK:
                self._out(bytes(waiting))
                waiting.clear()
        self._out(bytes(waiting))

    def _open(self, logs: Sequence[runs.LogRecord]) -> None:
        """Open the LOGS that are not open yet."""
        if self._is_prefixed is None:
            self._is_prefixed = len(logs) > 1
        for place, log in enumerate(logs):
            for path, of in zip(log.paths, ("", " stderr"), strict=False):
                if path not in self._streams:
                    attempt = log.attempt if self._filter.tells_attempt else 0
                    name = f"{log.label}{of}" + (f", attempt {attempt}" if attempt else "")
                    prefix = self._prefix(name, place if log.rank is None else log.rank)
                    self._streams[path] = self._stream(log, path, prefix)

    def _stream(self, log: runs.LogRecord, path: str, prefix: bytes) -> Stream | None:
        """Return the stream of the file PATH of LOG; None, with a remark, if it is unreadable."""
        folder, name = os.path.split(path)
        path_of_times = os.path.join(folder, names.OUTPUT_TIMES)
        reader = self._times.setdefault(folder, outputtimes.Reader(path_of_times))

        def times() -> LogTimes:
            return reader.read().get(name) or LogTimes([], [], [])

        try:
            file = LogFile(path, times)
        except OSError as error:
            remark(f"the log of {log.label} cannot be read: {path} ({error.strerror}).")
            return None
        begin, since = file.begin, self._filter.since
        if since is not None:
            is_newer = file.written_at() >= since
            begin = _line_at(file, times().offset_at(since * 1000)) if is_newer else file.end()
        if self._filter.most_bytes is not None:
            begin = max(begin, _line_at(file, file.end() - self._filter.most_bytes))
        is_raw = not (prefix or self._filter.pattern or log.error_path)
        return Stream(file, times, self._filter, at=begin, prefix=prefix, is_raw=is_raw)

    def _prefix(self, name: str, number: int) -> bytes:
        if not self._is_prefixed:
            return b""
        if not self._filter.is_coloured:
            return f"[{name}] ".encode()
        return f"\x1b[{_COLORS[number % len(_COLORS)]}m[{name}]\x1b[0m ".encode()


def _line_at(file: LogFile, at: int) -> int:
    """Return the offset of the line of FILE that contains AT, or of the first later one."""
    before = max(file.begin, at - _LONGEST_LINE)
    if before >= at:
        return max(at, file.begin)
    piece = file.read(before, at - before)
    return before + piece.rfind(b"\n") + 1 if b"\n" in piece else at
