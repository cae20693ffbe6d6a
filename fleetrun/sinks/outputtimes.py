"""Notes in `output.times` when each log grew, at most ten times a second.

Ranks write their own files, without times. Each check costs one stat per log, however much was
written; the time noted is the file's own, so it is precise even between checks.
"""

from __future__ import annotations

import os
import time

from fleetrun.run.events import Finished, Gathered, Happening, Started
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import names, outputtimes
from fleetrun.rundir.folder import append_whole

# How often logs are checked, after a check that finds nothing new.
_PACE_S, _QUIET_PACE_S = 0.1, 0.3
# With very many logs, checks are so rare that they take at most 0.5 % of a core.
_REST = 200
# Each time the file grows by this much, checks become half as frequent.
_LENGTHY = 64 * 1024 * 1024


class OutputTimes(Sink):
    """Writes the times of the logs."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        self._fd = -1
        self._size = 0
        # The logs of this attempt: descendants of a process may still write when it has ended.
        # How much each had.
        self._logs: dict[str, int] = {}

    def open(self, waiting: Waiting) -> None:
        """Begin the file and the checks."""
        super().open(waiting)
        self._fd = self._job.folder.append(names.OUTPUT_TIMES)
        waiting.timer("look", time.monotonic() + _PACE_S, self._look)

    def on_event(self, happening: Happening) -> None:
        """Follow the logs of each process that starts."""
        if isinstance(happening, Started):
            self._logs |= dict.fromkeys(self._job.logs(happening), 0)
        elif isinstance(happening, Finished | Gathered):
            self._note()
            self._logs.clear()

    def close(self) -> None:
        """End the file."""
        os.close(self._fd)

    def _look(self) -> None:
        begin = time.monotonic()
        pace_s = _PACE_S if self._note() else _QUIET_PACE_S
        took_s = time.monotonic() - begin
        pace_s = max(pace_s, took_s * _REST) * 2 ** (self._size // _LENGTHY)
        self._waiting.timer("look", begin + pace_s, self._look)

    def _note(self) -> bool:
        lines = []
        for path, before in self._logs.items():
            try:
                status = os.stat(path, follow_symlinks=False)
            except OSError:
                # Somebody removed it; the rank goes on writing to the deleted file.
                continue
            if status.st_size != before:
                self._logs[path] = status.st_size
                at_ms = status.st_mtime_ns // 1_000_000
                lines.append(outputtimes.noted(at_ms, status.st_size, os.path.basename(path)))
        if lines:
            text = b"".join(lines)
            append_whole(self._fd, text)
            self._size += len(text)
        return bool(lines)
