"""`--log_max_size`: keeps each process's log short, without ever blocking a rank.

A rank writes straight into its file and cannot be told to open another one. So the whole file is
copied to `workerlog.N.1` (older ones move to `.2`, `.3`; the oldest is deleted), and then cut to
nothing, at the end of a line. Output of the microseconds between the last look and the cut is lost.

Sizes are checked once a second; until the next check, and while a line is unfinished, a file may be
larger. A file `*.part` is an unfinished copy; its bytes are still in the log itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fleetrun.run.events import Finished, Gathered, Happening, Started
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir.names import label_of

_PACE_S = 1.0
# The number of older parts of each log.
_KEPT = 3
# A file of so many limits is cut within a line: it may have no lines.
_LONGEST = 4
# How often a rank may write while its log is copied, before the next check.
_TRIES = 100


class Cut(NamedTuple):
    """The LENGTH bytes of LOG have moved to its first archive."""

    log: str
    length: int


class Rotation(Sink):
    """Cuts logs according to --log_max_size; SHOW is called before each cut, and FOLLOW after."""

    def __init__(
        self, job: ObservedJob, *, show: Callable[[], None], follow: Callable[[Cut], None]
    ) -> None:
        self._job = job
        self._max_bytes = job.request.log_max_bytes
        self._show, self._follow = show, follow
        # The logs of each process.
        self._logs: dict[int, tuple[str, ...]] = {}
        self._has_complained = False

    def open(self, waiting: Waiting) -> None:
        """Begin to check sizes."""
        super().open(waiting)
        waiting.timer("look", time.monotonic() + _PACE_S, self._look)

    def on_event(self, happening: Happening) -> None:
        """Follow the logs of each process that starts."""
        if isinstance(happening, Started):
            self._logs[happening.process] = self._job.logs(happening)
        elif isinstance(happening, Gathered | Finished):
            self._logs.clear()

    def _look(self) -> None:
        for process, logs in self._logs.items():
            for log in logs:
                self._rotate(log, label_of(self._job.plan.processes[process].name))
        self._waiting.timer("look", time.monotonic() + _PACE_S, self._look)

    def _rotate(self, log: str, name: str) -> None:
        try:
            self._cut(log)
        except OSError as error:
            with suppress(OSError):
                os.unlink(f"{log}.part")
            if not self._has_complained:
                self._has_complained = True
                self._job.log(
                    f"The log of {name} could not be rotated ({error.strerror}); nothing is lost, "
                    "it keeps growing, and fleetrun will try again."
                )

    def _cut(self, log: str) -> None:
        """Cut LOG if it is too long and its rank is at the end of a line; raises OSError."""
        with open(os.open(log, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "rb+", 0) as file:
            fd = file.fileno()
            if os.fstat(fd).st_size <= self._max_bytes:
                return
            # A killed launcher may have left it, or another user put a link there.
            with suppress(FileNotFoundError):
                os.unlink(f"{log}.part")
            length = self._copy(fd, f"{log}.part")
            if not length:
                os.unlink(f"{log}.part")
                return
            os.ftruncate(fd, 0)
        for number in range(_KEPT - 1, 0, -1):
            if os.path.exists(f"{log}.{number}"):
                os.replace(f"{log}.{number}", f"{log}.{number + 1}")
        os.replace(f"{log}.part", f"{log}.1")
        self._follow(Cut(log, length))

    def _copy(self, fd: int, path: str) -> int:
        """Copy the log FD to PATH, and show it; return its length, or 0 if it must not be cut."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        copied = 0
        with open(os.open(path, flags, 0o666), "wb", 0) as copy:
            for _ in range(_TRIES):
                while sent := os.sendfile(copy.fileno(), fd, copied, self._max_bytes):
                    copied += sent
                is_long = copied > _LONGEST * self._max_bytes
                if not is_long and os.pread(fd, 1, copied - 1) not in {b"\n", b"\r"}:
                    continue
                self._show()
                if is_long or os.fstat(fd).st_size == copied:
                    return copied
        return 0
