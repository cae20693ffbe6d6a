"""Shows logs unchanged or merged in the order of their output, and follows them."""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from typing import NamedTuple

from fleetrun.printing import put, remark
from fleetrun.rundir import names, outputtimes, reading, runs
from fleetrun.rundir.outputtimes import LogTimes

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

# Returns the logs to show of runs as they are now.
ChooseLogs = Callable[[Sequence[runs.Run]], list[runs.LogRecord]]


class LogFilter(NamedTuple):
    """The parts of each log to show, and how."""

    pattern: re.Pattern[bytes] | None = None
    # Wall clock, in seconds; None: from the beginning.
    since: float | None = None
    # Show only this many bytes at the end of each file; None: all.
    most_bytes: int | None = None
    is_coloured: bool = False
    # Whether each line begins with its rank; None: if there are several logs.
    is_prefixed: bool | None = None
    # Whether control sequences (colours, titles, cursor moves, bells) are removed.
    is_clean: bool = False


class LogStream:
    """The output in one file as FILTER shows it: in whole lines with PREFIX, or unchanged."""

    def __init__(
        self,
        path: str,
        reader: outputtimes.Reader,
        log_filter: LogFilter,
        *,
        prefix: bytes,
        is_raw: bool,
    ) -> None:
        """Open the file PATH, whose times READER reads; OSError if that fails."""
        self._name = os.path.basename(path)
        self._reader = reader
        self._fd = os.open(path, reading.READING)
        self._prefix = prefix
        self._filter = log_filter
        self._is_raw = is_raw
        # What has been read ahead, and the beginning of a line or of an escape sequence.
        self._ahead = memoryview(b"")
        self._begun = b""
        self._at, status = 0, os.fstat(self._fd)
        if log_filter.since is not None:
            is_newer = status.st_mtime >= log_filter.since
            at = self._times().offset_at(log_filter.since * 1000)
            self._at = self._line_at(at) if is_newer else status.st_size
        if log_filter.most_bytes is not None:
            self._at = max(self._at, self._line_at(status.st_size - log_filter.most_bytes))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _times(self) -> LogTimes:
        return self._reader.read().get(self._name) or LogTimes([], [])

    def _line_at(self, at: int) -> int:
        """Return the offset of the line that contains AT, or of the first later one."""
        before = max(0, at - _LONGEST_LINE)
        if before >= at:
            return max(at, 0)
        piece = os.pread(self._fd, at - before, before)
        return before + piece.rfind(b"\n") + 1 if b"\n" in piece else at

    def news(self, place: int, *, is_alone: bool) -> Iterator[tuple[int, int, bytes]]:
        """Yield what was written since the last look: when, in milliseconds, PLACE, and the text.

        IS_ALONE: the times do not matter.
        """
        times, status = self._times(), os.fstat(self._fd)
        if status.st_size < self._at:
            # --log_max_size has cut it.
            self._at, self._ahead, self._begun = 0, memoryview(b""), b""
        written_ms = int(status.st_mtime * 1000)
        if not is_alone:
            first = bisect_right(times.offsets, self._at)
            for at_ms, until in zip(times.at_ms[first:], times.offsets[first:], strict=True):
                written_ms = max(written_ms, at_ms)
                yield from ((at_ms, place, text) for text in self._read(until))
        # Not noted yet, or never: the launcher was killed, or the disk is full.
        yield from ((written_ms, place, text) for text in self._read(status.st_size))

    def _read(self, until: int) -> Iterator[bytes]:
        """Yield what ends before the offset UNTIL."""
        while self._at < until:
            self._ahead = self._ahead or memoryview(os.pread(self._fd, _CHUNK, self._at))
            piece, self._ahead = self._ahead[: until - self._at], self._ahead[until - self._at :]
            if not piece:
                break
            self._at += len(piece)
            body = self._begun + piece
            end = body.rfind(b"\n") + 1
            if self._is_raw:
                begun = _BEGUN.search(body) if self._filter.is_clean else None
                end = len(body) if begun is None else begun.start()
            self._begun = body[end:]
            yield self._shown(body[:end])

    def rest(self) -> bytes:
        """Return the beginning of a line that has no end."""
        body = self._begun
        if not self._is_raw:
            body = body + b"\n" if body.strip(b"\r") else b""
        return self._shown(body)

    def _shown(self, body: bytes) -> bytes:
        if self._filter.is_clean:
            body = _ACTS.sub(b"", body)
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


def show(
    chosen: Sequence[runs.Run],
    choose: ChooseLogs,
    log_filter: LogFilter,
    *,
    follows: bool = False,
) -> int:
    """Print the logs that CHOOSE selects of the runs CHOSEN; return how many there are.

    FOLLOWS: also what comes until the launchers have ended, of files that appear, too.
    """
    reader = runs.RunReader()
    times: dict[str, outputtimes.Reader] = {}
    # By path; None: it cannot be read.
    streams: dict[str, LogStream | None] = {}
    is_over = False
    while not is_over:
        # Checked first, so that the last look sees everything.
        is_over = not (follows and any(run.is_running for run in chosen))
        chosen = [reader.read(run.path) for run in chosen] if follows else chosen
        logs = choose(chosen)
        if log_filter.is_prefixed is None:
            log_filter = log_filter._replace(is_prefixed=len(logs) > 1)
        for log in logs:
            for path, of in zip(log.paths, ("", " stderr"), strict=False):
                if path not in streams:
                    folder = os.path.dirname(path)
                    noted = os.path.join(folder, names.OUTPUT_TIMES)
                    note_reader = times.setdefault(folder, outputtimes.Reader(noted))
                    streams[path] = _opened(log, path, of, note_reader, log_filter)
        known = [stream for stream in streams.values() if stream is not None]
        is_alone = len(known) == 1
        waiting = bytearray()
        for _, _, text in merge(*(s.news(n, is_alone=is_alone) for n, s in enumerate(known))):
            waiting += text
            if len(waiting) >= _CHUNK:
                put(bytes(waiting))
                waiting.clear()
        put(bytes(waiting) + b"".join(stream.rest() for stream in known if is_over))
        if not is_over:
            time.sleep(_PACE_S)
    for stream in known:
        stream.close()
    return len(known)


def _opened(
    log: runs.LogRecord, path: str, of: str, reader: outputtimes.Reader, log_filter: LogFilter
) -> LogStream | None:
    """Return the stream of the file PATH of LOG; None, with a remark, if it is unreadable."""
    prefix = f"[{log.title(of)}]"
    if log_filter.is_coloured:
        prefix = f"\x1b[{_COLORS[(log.rank or 0) % len(_COLORS)]}m{prefix}\x1b[0m"
    is_raw = not (log_filter.is_prefixed or log_filter.pattern or log.error_path)
    shown_prefix = f"{prefix} ".encode() if log_filter.is_prefixed else b""
    try:
        return LogStream(path, reader, log_filter, prefix=shown_prefix, is_raw=is_raw)
    except OSError as error:
        remark(f"the log of {log.label} cannot be read: {path} ({error.strerror}).")
        return None
