"""Standard output or error, written in order and without ever blocking on its reader."""

from __future__ import annotations

import _socket  # `socket` takes 2 ms to import
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable

from fleetrun.run.loop import WRITABLE, Waiting, poll

# A pipe that is ready for writing accepts this much.
_PIPE_ROOM = 4096


class Writer:
    """FD 1 or 2 of the launcher; what its reader does not take is kept, the newest MOST pieces."""

    def __init__(self, fd: int, most: int | None = None) -> None:
        self.fd = fd
        # Whether nothing can be written any more, and what is wrong: a clause without its subject.
        self.is_closed = False
        self.fault = ""
        self.is_terminal = False
        self._queue: deque[bytes] = deque(maxlen=most)
        self._waiting: Waiting | None = None
        self._drained: Callable[[], None] = lambda: None
        self._is_watching = False
        self._timeout_s = 0.0
        self._progress_at = 0.0
        self._socket: _socket.socket | None = None
        # Whether it was opened again, and whether writing may block.
        self._is_own = self._is_careful = False
        # If it was closed at the start, its number may now belong to any other file.
        if (sys.__stdout__ if fd == 1 else sys.__stderr__) is None:
            self.is_closed = True
            return
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            self.is_closed = True
            return
        self.is_terminal = os.isatty(fd)
        if stat.S_ISSOCK(mode):
            self._socket = _socket.socket(fileno=os.dup(fd))
            self.fd = self._socket.fileno()
        elif stat.S_ISFIFO(mode) or self.is_terminal:
            # O_NONBLOCK belongs to the open file description, which the user's shell shares; so
            # open the file again.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                self.fd = os.open(f"/proc/self/fd/{fd}", flags)
                self._is_own = True
            except OSError:
                # Another user's terminal (su), or a pipe whose reader is gone.
                self._is_careful = True

    @property
    def is_busy(self) -> bool:
        """Whether the reader has not taken everything."""
        return bool(self._queue)

    def open(self, waiting: Waiting, drained: Callable[[], None] = lambda: None) -> None:
        """Write what was put so far, and call DRAINED each time a reader that was slow has all."""
        self._waiting, self._drained = waiting, drained
        self.flush()

    def put(self, data: bytes) -> None:
        """Write DATA after what was put before."""
        self._queue.append(data)
        self.flush()

    def flush(self) -> None:
        """Write as much as the reader takes."""
        while self._queue and not self.is_closed:
            data = self._queue[0]
            try:
                taken = self._write(data)
            except OSError as error:
                # Such as a full disk under a redirected stream.
                self.fault = f"cannot be written ({error.strerror})"
                taken = len(data)
            if taken:
                self._progress_at = time.monotonic()
            if taken < len(data):
                self._queue[0] = data[taken:]
                self._watch()
                return
            self._queue.popleft()
        if self.is_closed:
            self._queue.clear()
        if self._is_watching and self._waiting is not None:
            self._waiting.unwatch(self.fd)
            self._is_watching = False

    def _write(self, data: bytes) -> int:
        try:
            if self._socket is not None:
                return self._socket.send(data, _socket.MSG_DONTWAIT)
            if self._is_careful:
                has_room = poll(0.0, self.fd, mask=WRITABLE)
                return os.write(self.fd, data[:_PIPE_ROOM]) if has_room else 0
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            self.is_closed = True
            return len(data)

    def _watch(self) -> None:
        if self._waiting is not None and not self._is_watching and not self.is_closed:
            self._waiting.watch(self.fd, self._on_room, WRITABLE)
            self._is_watching = True

    def _on_room(self) -> None:
        self.flush()
        if not self._queue:
            self._drained()

    def finish(self, timeout_s: float) -> None:
        """Drop what is left once the reader has taken nothing for TIMEOUT_S seconds."""
        self._timeout_s, self._progress_at = timeout_s, time.monotonic()
        self._expire()

    def _expire(self) -> None:
        now, at = time.monotonic(), self._progress_at + self._timeout_s
        if self._queue and now >= at:
            self.fault = f"accepted nothing for {self._timeout_s:g} s"
            self._queue.clear()
            self.flush()
            self._drained()
        elif self._waiting is not None:
            self._waiting.timer(("reader", self.fd), max(at, now + 0.05), self._expire)

    def close(self) -> None:
        """Close the file that was opened here."""
        self._queue.clear()
        if self._waiting is not None:
            self._waiting.timer(("reader", self.fd), None, self._expire)
        if not self.is_closed:
            self.is_closed = True
            self.flush()
        if self._is_own:
            os.close(self.fd)
            self._is_own = False
        if self._socket is not None:
            self._socket.close()
