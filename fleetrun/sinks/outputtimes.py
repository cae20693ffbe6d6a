"""Notes in `output.times` when each log grew, at most ten times a second.

Ranks write their own files, without times. Each check costs one stat per log, however much was
written; the time noted is the file's own, so it is precise even between checks.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass

from fleetrun.run.events import Finished, Gathered, Happening, Started
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import names, outputtimes
from fleetrun.rundir.folder import append_whole
from fleetrun.sinks.rotate import Cut

_PACE_S = 0.1
# After each check that finds nothing new the pause is longer, up to this: eight quiet ranks cost
# 0.1 % of a core.
_SLOWER, _QUIET_PACE_S = 1.1, 0.5
# The clock of file times may lag by this much.
_TICK_MS = 20
# With very many logs, checks are so rare that they take at most 0.5 % of a core.
_REST = 200
# Each time the file grows by this much, checks become half as frequent.
_LENGTHY = 64 * 1024 * 1024


@dataclass(slots=True)
class _WatchedLog:
    """A log that may grow: how much was ever written to it, and how much of that is in archives."""

    number: int
    path: str
    offset: int = 0
    base: int = 0


class OutputTimes(Sink):
    """Writes the times of the logs."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        self._fd = -1
        self._size = 0
        self._pace_s = _PACE_S
        self._base_ms = 0
        self._looked_at_ms = 0
        self._count = 0
        # The logs of this attempt: descendants of a process may still write when it has ended.
        self._logs: dict[str, _WatchedLog] = {}

    def open(self, waiting: Waiting) -> None:
        """Begin the file and the checks."""
        super().open(waiting)
        self._fd = self._job.folder.append(names.OUTPUT_TIMES)
        self._base_ms = _now_ms()
        self._write(outputtimes.head(self._base_ms))
        waiting.timer("look", time.monotonic() + _PACE_S, self._look)

    def on_event(self, happening: Happening) -> None:
        """Follow the logs of each process that starts."""
        if self._fd < 0:
            return
        if isinstance(happening, Started):
            for path in self._job.logs(happening):
                log = self._logs[path] = _WatchedLog(self._count, path)
                self._count += 1
                self._write(outputtimes.named(log.number, os.path.basename(path)))
        elif isinstance(happening, Gathered) and happening.attempt:
            self._note()
            self._logs.clear()
        elif isinstance(happening, Finished):
            self._note()

    def follow(self, cut: Cut) -> None:
        """Note that a log has moved to an archive."""
        log = self._logs.get(cut.log)
        if log is None or self._fd < 0:
            return
        log.base += cut.length
        try:
            self._write(outputtimes.moved(log.number, log.base))
        except OSError:
            # From here on, offsets would mean something else.
            self.close()

    def close(self) -> None:
        """End the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _look(self) -> None:
        if self._fd < 0:
            return
        begin = time.monotonic()
        has_grown = self._note()
        took_s = time.monotonic() - begin
        self._pace_s = _PACE_S if has_grown else min(_SLOWER * self._pace_s, _QUIET_PACE_S)
        pace_s = max(self._pace_s, took_s * _REST) * 2 ** (self._size // _LENGTHY)
        self._waiting.timer("look", begin + pace_s, self._look)

    def _note(self) -> bool:
        """Record which logs have grown; return whether any has."""
        lines = []
        now = _now_ms()
        for log in self._logs.values():
            try:
                status = os.stat(log.path, follow_symlinks=False)
            except OSError:
                # Somebody removed it; the rank goes on writing to the deleted file.
                continue
            offset = log.base + status.st_size
            if offset == log.offset or not stat.S_ISREG(status.st_mode):
                continue
            log.offset = offset
            at = status.st_mtime_ns // 1_000_000
            if not self._looked_at_ms - _TICK_MS <= at <= now:
                # A file server with another clock: its times mean nothing here.
                at = now
            lines.append(outputtimes.noted(at - self._base_ms, log.number, offset))
        self._looked_at_ms = now
        if lines:
            self._write(b"".join(lines))
        return bool(lines)

    def _write(self, text: bytes) -> None:
        """Write all of TEXT, or fail."""
        append_whole(self._fd, text)
        self._size += len(text)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
