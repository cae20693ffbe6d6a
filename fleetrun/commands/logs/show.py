"""Shows logs unchanged or merged, and follows them while the job runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fleetrun.commands.logs import merge
from fleetrun.commands.logs.clean import Cleaner
from fleetrun.printing import remark, write
from fleetrun.run.loop import Loop, nothing
from fleetrun.rundir import names, outputtimes, runs
from fleetrun.rundir.logfile import LogFile

# Bytes that are read at a time.
_PIECE = 1 << 18
_PACE_S = 0.1
_LONGEST_LINE = 65536
# Cyan, yellow, green, magenta, blue; red means failure.
_COLORS = (36, 33, 32, 35, 34)


class LogFilter(NamedTuple):
    """The parts of each log to show."""

    pattern: re.Pattern[bytes] | None
    # Wall clock, in seconds; None: from the beginning.
    since: float | None
    is_coloured: bool
    # Whether the prefix shows the attempt.
    tells_attempt: bool
    # Whether control sequences are removed.
    is_clean: bool = False
    # Show only this many bytes at the end of each file; None: all.
    most_bytes: int | None = None


class OpenLog(NamedTuple):
    """An open log and its lines."""

    file: LogFile
    times: outputtimes.LogTimes
    stream: merge.Stream
    cleaner: Cleaner | None


class Viewer:
    """Shows the logs of the runs CHOSEN that CHOOSE selects; merged ones are written by OUT."""

    def __init__(
        self,
        chosen: Sequence[runs.Run],
        choose: Callable[[Sequence[runs.Run]], list[runs.LogRecord]],
        log_filter: LogFilter,
        out: Callable[[bytes], None] = write,
    ) -> None:
        self._out = out
        self._runs = list(chosen)
        self._choose = choose
        self._filter = log_filter
        self._readers: dict[str, outputtimes.Reader] = {}
        self._reader = runs.RunReader()
        self._shown: dict[str, OpenLog] = {}
        self._missing: set[str] = set()
        self._is_prefixed = True
        # Whether standard error has its own files.
        self._is_split = False

    def show(self) -> int:
        """Show the logs, and return their number."""
        logs = self._choose(self._runs)
        self._is_prefixed = len(logs) > 1
        self._open(logs)
        if self._is_plain:
            self._copy(is_over=not self._is_running())
        else:
            merge.joined(self._history(is_last=True), self._out)
        return len(self._shown)

    def merge(self) -> None:
        """Write all lines to OUT, each with its prefix, and close the files."""
        self._open(self._choose(self._runs))
        merge.joined(self._history(is_last=True), self._out)
        for log in self._shown.values():
            log.file.close()
        self._shown.clear()

    def follow(self, *, is_one: bool) -> int:
        """Show the logs and follow them until the launchers end; return their number.

        IS_ONE: there is never more than one process to show.
        """
        self._is_prefixed = not is_one
        self._open(self._choose(self._runs))
        if not self._is_plain:
            merge.joined(self._history(is_last=False), self._out)
        loop = Loop()
        is_over = False
        while not is_over:
            # Checked first, so that the last refresh sees everything.
            is_over = not self._is_running()
            self._refresh()
            if self._is_plain:
                self._copy(is_over=is_over)
            else:
                merge.joined(self._news(is_last=is_over), self._out)
            if not is_over:
                loop.timer("look", time.monotonic() + _PACE_S, nothing)
                loop.turn()
        loop.close()
        return len(self._shown)

    @property
    def _is_plain(self) -> bool:
        """Whether logs are shown as they are."""
        return not self._is_prefixed and self._filter.pattern is None and not self._is_split

    def _refresh(self) -> None:
        """Update the list of processes."""
        self._runs = [self._reader.read(run.path) for run in self._runs]
        self._open(self._choose(self._runs))

    def _is_running(self) -> bool:
        return any(run.is_running for run in self._runs)

    def _copy(self, *, is_over: bool) -> None:
        """Show new output unchanged."""
        for log in self._shown.values():
            end = log.file.end()
            while log.stream.at < end:
                piece = log.file.read(log.stream.at, min(_PIECE, end - log.stream.at))
                if not piece:
                    break
                write(piece if log.cleaner is None else log.cleaner.feed(piece))
                log.stream.at += len(piece)
            if log.cleaner is not None:
                write(log.cleaner.feed(b"", is_last=is_over))
            log.stream.at = end

    def _news(self, *, is_last: bool) -> Iterator[bytes]:
        """Yield new output, in the order in which the logs were written."""
        for log in sorted(self._shown.values(), key=lambda log: log.file.written_at()):
            end = log.file.end()
            yield from log.stream.lines(end)
            if is_last:
                yield log.stream.rest(end)

    def _history(self, *, is_last: bool) -> Iterator[bytes]:
        """Yield all lines so far, in order; if IS_LAST also unfinished ones."""
        shown = list(self._shown.values())
        ends = [log.file.end() for log in shown]
        notes = []
        for log, end in zip(shown, ends, strict=True):
            at, offsets = [*log.times.at_ms], [*log.times.offsets]
            if not offsets or offsets[-1] < end:
                # Not noted yet, or never: the launcher was killed, or the disk is full.
                written_ms = int(log.file.written_at() * 1000)
                at.append(max(written_ms, at[-1] if at else 0))
                offsets.append(end)
            notes.append((at, offsets))
        yield from merge.history([log.stream for log in shown], notes)
        if is_last:
            for log, end in zip(shown, ends, strict=True):
                yield log.stream.rest(end)

    def _open(self, logs: Sequence[runs.LogRecord]) -> None:
        """Open the LOGS that are not open yet."""
        self._is_split = any(log.error_path for log in logs)
        files = [
            (place, log, path, stream_name)
            for place, log in enumerate(logs)
            for path, stream_name in zip(log.paths, ("", " stderr"), strict=False)
        ]
        for place, log, path, stream_name in files:
            if path in self._shown or path in self._missing:
                continue
            folder, name = os.path.split(path)
            reader = self._readers.setdefault(
                folder, outputtimes.Reader(os.path.join(folder, names.OUTPUT_TIMES))
            )

            def times(
                reader: outputtimes.Reader = reader, name: str = name
            ) -> outputtimes.LogTimes:
                return reader.read().get(name) or outputtimes.LogTimes([], [], [])

            try:
                file = LogFile(path, times)
            except OSError as error:
                self._missing.add(path)
                remark(f"the log of {log.label} cannot be read: {path} ({error.strerror}).")
                continue
            prefix = b""
            if self._is_prefixed:
                shows_attempt = log.attempt and self._filter.tells_attempt
                name = f"{log.label}{stream_name}" + (
                    f", attempt {log.attempt}" if shows_attempt else ""
                )
                prefix = self._prefix(name, log.rank if log.rank is not None else place)
            noted = times()
            since = self._filter.since
            begin = 0 if since is None else file.end()
            if since is not None and file.written_at() >= since:
                begin = self._line_at(file, noted.offset_at(since * 1000))
            if self._filter.most_bytes is not None:
                begin = max(begin, self._line_at(file, file.end() - self._filter.most_bytes))
            stream = merge.Stream(
                file,
                at=begin,
                prefix=prefix,
                pattern=self._filter.pattern,
                is_clean=self._filter.is_clean,
            )
            cleaner = Cleaner() if self._filter.is_clean else None
            self._shown[path] = OpenLog(file, noted, stream, cleaner)

    @staticmethod
    def _line_at(file: LogFile, at: int) -> int:
        """Return the offset of the line that contains AT, or of the first later one."""
        before = max(file.begin, at - _LONGEST_LINE)
        if before >= at:
            return max(at, file.begin)
        piece = file.read(before, at - before)
        return before + piece.rfind(b"\n") + 1 if b"\n" in piece else at

    def _prefix(self, name: str, number: int) -> bytes:
        if not self._filter.is_coloured:
            return f"[{name}] ".encode()
        return f"\x1b[{_COLORS[number % len(_COLORS)]}m[{name}]\x1b[0m ".encode()
