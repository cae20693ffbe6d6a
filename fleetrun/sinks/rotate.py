"""`--log_max_size`: keeps each process's log short, without ever blocking a rank.

A rank writes straight into its file and cannot be told to open another one. So the whole file is
copied to `workerlog.N.1` (older ones move to `.2`, `.3`; the oldest is deleted), and then cut to
nothing, at the end of a line. Output of the microseconds between the last look and the cut is lost.

Sizes are checked once a second; until the next check, and while a line is unfinished, a file may be
larger. A file `*.part` is an unfinished copy; its bytes are still in the log itself.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fleetrun.run.events import Finished, Gathered, Happening, Started
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir.names import label

# Copied in one turn of the loop, until the next.
_PIECE = 4 * 1024 * 1024
_PACE_S = 1.0
_NEXT_S = 0.01
# The number of older parts of each log.
_KEPT = 3
# After a copy that failed.
_AGAIN_S = 10.0
# A file of so many limits is cut within a line: it may have no lines.
_LONGEST = 4


class Cut(NamedTuple):
    """The LENGTH bytes of LOG have moved to its first archive."""

    log: str
    length: int


class _RotatedLog:
    """A log that is being written, and the copy of it, which is begun when it is too long."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._copy_fd = -1
        self._copied = 0
        self.quiet_until = 0.0

    @property
    def is_copying(self) -> bool:
        """Whether there is an unfinished copy."""
        return self._copy_fd >= 0

    def size(self) -> int:
        """Return how many bytes it has."""
        return os.fstat(self._fd).st_size

    def copy(self, limit: int, show: Callable[[], None]) -> int:
        """Copy the next piece; return the number of bytes that were cut off, once all are copied.

        SHOW is called just before. A log of more than LIMIT bytes is cut within a line. Raises
        OSError.
        """
        if not self.is_copying:
            # A failed copy may have left it, or another user put a link there.
            with suppress(FileNotFoundError):
                os.unlink(f"{self.path}.part")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._copy_fd, self._copied = os.open(f"{self.path}.part", flags, 0o666), 0
        stop = self._copied + _PIECE
        while self._copied < (size := self.size()) and self._copied < stop:
            sent = os.sendfile(self._copy_fd, self._fd, self._copied, size - self._copied)
            if not sent:
                break
            self._copied += sent
        if size < self._copied:
            raise OSError(errno.ESTALE, "another program truncated it")
        ends_line = size < 1 or os.pread(self._fd, 1, size - 1) in {b"\n", b"\r"}
        if self._copied < size or not (ends_line or size > limit):
            return 0
        show()
        if self.size() != size <= limit:
            return 0
        os.ftruncate(self._fd, 0)
        for number in range(_KEPT - 1, 0, -1):
            if os.path.exists(f"{self.path}.{number}"):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        os.replace(f"{self.path}.part", f"{self.path}.1")
        self._close_copy()
        return size

    def abandon(self) -> None:
        """Remove the copy; the file is unchanged."""
        if self.is_copying:
            self._close_copy()
            # The folder may be gone, and the copy with it.
            with suppress(OSError):
                os.unlink(f"{self.path}.part")

    def _close_copy(self) -> None:
        os.close(self._copy_fd)
        self._copy_fd = -1

    def close(self) -> None:
        """Stop."""
        self.abandon()
        os.close(self._fd)


class Rotation(Sink):
    """Cuts logs according to --log_max_size; SHOW is called before each cut, and FOLLOW after."""

    def __init__(
        self, job: ObservedJob, *, show: Callable[[], None], follow: Callable[[Cut], None]
    ) -> None:
        self._job = job
        self._max_bytes = job.request.log_max_bytes
        self._show, self._follow = show, follow
        # The logs of each process.
        self._logs: dict[int, list[_RotatedLog]] = {}
        self._has_complained = False

    def open(self, waiting: Waiting) -> None:
        """Begin to check sizes."""
        self._waiting = waiting
        waiting.timer("look", time.monotonic() + _PACE_S, self._look)

    def on_event(self, happening: Happening) -> None:
        """Follow the logs of each process that starts."""
        if isinstance(happening, Started):
            spec = self._job.plan.processes[happening.process]
            self._drop(happening.process)
            logs = self._logs[happening.process] = []
            try:
                logs.extend(_RotatedLog(path, label(spec)) for path in self._job.logs(happening))
            except OSError as error:
                self._complain(label(spec), error)
        elif isinstance(happening, Gathered | Finished):
            self.close()

    def close(self) -> None:
        """Follow no log any more."""
        for process in list(self._logs):
            self._drop(process)

    def _drop(self, process: int) -> None:
        for log in self._logs.pop(process, ()):
            log.close()

    def _look(self) -> None:
        now = time.monotonic()
        is_copying = False
        for log in [log for logs in self._logs.values() for log in logs]:
            is_copying = self._rotate(log, now) or is_copying
        pace_s = _NEXT_S if is_copying else _PACE_S
        self._waiting.timer("look", time.monotonic() + pace_s, self._look)

    def _rotate(self, log: _RotatedLog, now: float) -> bool:
        """Go on with LOG if it is too long; return whether its copy is unfinished."""
        try:
            if log.is_copying or (now >= log.quiet_until and log.size() > self._max_bytes):
                length = log.copy(_LONGEST * self._max_bytes, self._show)
                if length:
                    self._follow(Cut(log.path, length))
        except OSError as error:
            log.abandon()
            log.quiet_until = now + _AGAIN_S
            self._complain(log.name, error)
        return log.is_copying

    def _complain(self, name: str, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._job.log(
                f"The log of {name} could not be rotated ({error.strerror}); nothing is lost, it "
                "keeps growing, and fleetrun will try again."
            )
