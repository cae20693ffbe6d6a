"""`--log_max_size`: keeps each process's log short, without ever blocking a rank.

A rank writes straight into its file and cannot be told to open another one. So the whole file is
copied to `workerlog.N.1` (older ones move to `.2`, `.3`; the oldest is deleted), and then cut to
nothing, at the end of a line. Output of the microseconds between the last look and the cut is lost,
and more of a rank that writes faster than this copies.

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
# A file of so many limits is cut although its last line is unfinished; so much of that stays in the
# log. Of a file of twice as many, only the end is copied.
_LONGEST, _LONGEST_LINE = 4, 64 * 1024
# How often, and for how long, a rank may write while its log is copied: signals wait meanwhile.
_TRIES, _COPY_S = 100, 0.5


class Cut(NamedTuple):
    """The first LENGTH bytes of LOG have gone."""

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
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(log, flags), "rb+", 0) as file:
            fd = file.fileno()
            if os.fstat(fd).st_size <= self._max_bytes:
                return
            # A killed launcher may have left it, or another user put a link there.
            with suppress(FileNotFoundError):
                os.unlink(f"{log}.part")
            length = self._move(fd, f"{log}.part")
            if not length:
                os.unlink(f"{log}.part")
                return
        for number in range(_KEPT - 1, 0, -1):
            if os.path.exists(f"{log}.{number}"):
                os.replace(f"{log}.{number}", f"{log}.{number + 1}")
        os.replace(f"{log}.part", f"{log}.1")
        self._follow(Cut(log, length))

    def _move(self, fd: int, path: str) -> int:
        """Show the log FD, and move all but an unfinished line to PATH; return its length.

        Return 0 if it must not be cut yet.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        until, longest = time.monotonic() + _COPY_S, _LONGEST * self._max_bytes
        end, rest, is_whole = _first_copied(fd, longest), b"", False
        with open(os.open(path, flags, 0o666), "wb", 0) as copy:
            for _ in range(_TRIES):
                size = os.fstat(fd).st_size
                while sent := os.sendfile(copy.fileno(), fd, end, max(0, size - end)):
                    end += sent
                rest = _unfinished(fd, end)
                if rest and size <= longest:
                    continue
                self._show()
                size = os.fstat(fd).st_size
                is_whole = size == end
                if is_whole or time.monotonic() > until:
                    break
            if not is_whole and size <= longest:
                return 0
            # At once, as the rank goes on writing.
            os.ftruncate(fd, 0)
            if is_whole:
                size -= os.write(fd, rest)
            copy.truncate(copy.tell() - len(rest))
        return size


def _first_copied(fd: int, longest: int) -> int:
    """Return from where on FD is copied: a whole line of the end of a file of many limits."""
    size = os.fstat(fd).st_size
    if size <= 2 * longest:
        return 0
    return size - longest + os.pread(fd, _LONGEST_LINE, size - longest).find(b"\n") + 1


def _unfinished(fd: int, end: int) -> bytes:
    """Return what follows the last line of the first END bytes of FD, or the end of that."""
    begin = max(0, end - _LONGEST_LINE)
    text = os.pread(fd, end - begin, begin)
    at = max(text.rfind(b"\n"), text.rfind(b"\r"))
    return text[at + 1 :]
