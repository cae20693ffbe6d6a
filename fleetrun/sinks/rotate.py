"""`--log_max_size`: keeps each process's log short, without losing a byte or blocking a rank.

A rank writes straight into its file and cannot be told to open another one. So the beginning of the
file is copied to `workerlog.N.1` (older ones move to `.2`, `.3`, ...; the oldest is deleted) and
then removed from the file itself: on ext4 and xfs, and on overlays of these,
FALLOC_FL_COLLAPSE_RANGE does so atomically between two writes. `cat workerlog.N.2 workerlog.N.1
workerlog.N` prints everything that was written, byte for byte. The part removed is a multiple of 64
KiB, so a line may begin in one file and end in the next.

Where that is not supported (tmpfs, btrfs, zfs), FALLOC_FL_PUNCH_HOLE frees the space, but the file
keeps its length and begins with a hole that reads as zero bytes. Where neither works (NFS before
4.2), the launch is refused beforehand.

At least the last 64 KiB stay in the file, so that its end is where readers expect it. Sizes are
checked once a second; until the next check, and during the copy, a file may be larger. A file
`*.part` is an unfinished copy; its bytes are still in the log itself.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault
from fleetrun.run import libc
from fleetrun.run.events import Finished, Gathered, Happening, Started
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir.folder import Closing
from fleetrun.rundir.names import label

# A multiple of every block size; only such a range can be removed.
_UNIT = 64 * 1024
# What stays in the file; the report reads this much of its end.
_REST = 64 * 1024
# Copied in one turn of the loop.
_PIECE = 4 * 1024 * 1024
_PACE_S = 1.0
# The number of older parts of each log.
_KEPT = 3
# After a copy that failed.
_AGAIN_S = 10.0


class Cut(NamedTuple):
    """The first `length` bytes of LOG have moved to ARCHIVE."""

    log: str
    archive: str
    length: int
    # Whether the rest of LOG moved to its beginning; if not, it follows a hole.
    is_collapsed: bool
    # The maximum number of archives.
    kept: int


class _RotatedLog:
    """A log that is being written, and the copy of its beginning."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name
        self.fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        # The file is a hole up to this offset.
        self.begin = 0
        self.quiet_until = 0.0
        self._draft_fd = -1
        self._copied = 0

    @property
    def draft(self) -> str:
        """The name of the copy until it is complete."""
        return f"{self.path}.part"

    @property
    def copied(self) -> int:
        """The number of bytes copied from the beginning."""
        return self._copied - self.begin

    def is_over(self, limit: int) -> bool:
        """Whether the log has more than LIMIT bytes."""
        size = os.fstat(self.fd).st_size
        if size < self.begin:
            # The file was truncated; ranks continue at its start.
            self.begin = 0
        return size - self.begin > limit

    def start(self) -> None:
        """Begin a copy."""
        # A failed copy may have left it, or another user put a link there.
        with suppress(FileNotFoundError):
            os.unlink(self.draft)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._draft_fd = os.open(self.draft, flags, 0o666)
        self._copied = self.begin

    def go_on(self, most: int) -> bool:
        """Copy the next piece, up to MOST bytes in all; return whether the copy is complete."""
        size = os.fstat(self.fd).st_size
        if size < self._copied:
            raise OSError(errno.ESTALE, "another program truncated it")
        # Copy what is written meanwhile, too, so that less has to be moved.
        end = min(size - _REST, self.begin + most) // _UNIT * _UNIT
        stop = min(end, self._copied + _PIECE)
        while self._copied < stop:
            sent = os.sendfile(self._draft_fd, self.fd, self._copied, stop - self._copied)
            if not sent:
                raise OSError(errno.ESTALE, "another program truncated it")
            self._copied += sent
        return self._copied >= end

    def finish(self, files: int, *, can_collapse: bool) -> int:
        """Rename the copy, remove its bytes from the file, and return their number."""
        self._close_draft()
        length = self.copied
        for number in range(files - 1, 0, -1):
            if os.path.exists(f"{self.path}.{number}"):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        # In this order, a launcher killed here leaves bytes twice rather than not at all.
        os.replace(self.draft, f"{self.path}.1")
        try:
            if can_collapse:
                libc.fallocate(self.fd, libc.COLLAPSE_RANGE, self.begin, length)
            else:
                libc.fallocate(self.fd, libc.PUNCH_HOLE, self.begin, length)
                self.begin += length
        except OSError:
            os.unlink(f"{self.path}.1")
            raise
        return length

    def abandon(self) -> None:
        """Remove the copy; the file is unchanged."""
        if self._draft_fd >= 0:
            self._close_draft()
            try:
                os.unlink(self.draft)
            except OSError:
                # The folder is gone, and the copy with it.
                return

    def _close_draft(self) -> None:
        if self._draft_fd >= 0:
            os.close(self._draft_fd)
            self._draft_fd = -1

    def close(self) -> None:
        """Stop."""
        self.abandon()
        os.close(self.fd)


class Rotation(Sink):
    """Cuts logs according to --log_max_size, and reports each cut to FOLLOW."""

    def __init__(self, job: ObservedJob, follow: Callable[[Cut], None], files: int = _KEPT) -> None:
        self._job = job
        self._max_bytes, self._files = job.request.log_max_bytes, files
        self._follow = follow
        self._can_collapse = False
        # The logs of each process.
        self._logs: dict[int, list[_RotatedLog]] = {}
        self._queue: deque[_RotatedLog] = deque()
        self._has_complained = False
        self._is_over = False

    def prepare(self) -> None:
        """Try it on a scratch file. Raises EnvironmentFault if that fails."""
        folder = self._job.folder.path
        try:
            self._can_collapse = can_collapse(folder)
        except OSError as error:
            raise EnvironmentFault(
                f"--log_max_size cannot work in {folder} ({error.strerror}): its file system "
                "cannot remove the beginning of an open file (NFS cannot); "
                "choose a folder on a local disk with --log_dir, or leave --log_max_size out."
            ) from None

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
        elif isinstance(happening, Gathered):
            self._drop_all()
        elif isinstance(happening, Finished):
            self.close()

    def close(self) -> None:
        """Stop."""
        self._is_over = True
        self._drop_all()

    def _drop_all(self) -> None:
        for process in list(self._logs):
            self._drop(process)

    def _drop(self, process: int) -> None:
        for log in self._logs.pop(process, ()):
            if log in self._queue:
                self._queue.remove(log)
            log.close()

    def _look(self) -> None:
        if self._is_over:
            return
        now = time.monotonic()
        for log in [log for logs in self._logs.values() for log in logs]:
            if log not in self._queue and now >= log.quiet_until:
                try:
                    self._enlist(log)
                except OSError as error:
                    self._fail(log, error)
        self._waiting.timer("look", now + _PACE_S, self._look)
        if self._queue:
            self._waiting.timer("copy", now, self._copy)

    def _enlist(self, log: _RotatedLog) -> None:
        if log.is_over(self._max_bytes):
            log.start()
            self._queue.append(log)

    def _copy(self) -> None:
        """Copy one piece of one log, and schedule the next."""
        if not self._queue:
            return
        log = self._queue.popleft()
        try:
            if log.go_on(2 * self._max_bytes):
                self._cut(log)
            else:
                self._queue.append(log)
        except OSError as error:
            self._fail(log, error)
        if self._queue:
            self._waiting.timer("copy", time.monotonic(), self._copy)

    def _cut(self, log: _RotatedLog) -> None:
        length = log.finish(self._files, can_collapse=self._can_collapse)
        self._follow(Cut(log.path, f"{log.path}.1", length, self._can_collapse, self._files))
        # There may be more bytes than fit into one archive.
        self._enlist(log)

    def _fail(self, log: _RotatedLog, error: OSError) -> None:
        log.abandon()
        log.quiet_until = time.monotonic() + _AGAIN_S
        self._complain(log.name, error)

    def _complain(self, name: str, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._job.log(
                f"The log of {name} could not be rotated ({error.strerror}); nothing is lost, it "
                "keeps growing, and fleetrun will try again."
            )


def can_collapse(folder: str) -> bool:
    """Whether the beginning of a file in FOLDER can be removed; False: only freed.

    Raises OSError if neither is possible.
    """
    path = os.path.join(folder, f".rotation.{os.getpid()}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with Closing(fd := os.open(path, flags, 0o600)):
        os.unlink(path)
        os.pwrite(fd, b"a" * _UNIT + b"b" * _UNIT, 0)
        try:
            libc.fallocate(fd, libc.COLLAPSE_RANGE, 0, _UNIT)
        except OSError:
            libc.fallocate(fd, libc.PUNCH_HOLE, 0, _UNIT)
            if os.pread(fd, 1, 0) + os.pread(fd, 1, _UNIT) != b"\0b":
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) from None
            return False
        return os.fstat(fd).st_size == _UNIT and os.pread(fd, 1, 0) == b"b"
