"""Standard output or error, written without ever blocking on its reader."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from contextlib import suppress
from socket import socket

from fleetrun.run.loop import WRITABLE, poll

# A full pipe is enlarged to this, so that its writer waits less often.
_PIPE_BYTES = 256 * 1024
# A pipe that is ready for writing accepts this much.
_PIPE_ROOM = 4096


class Outlet:
    """FD 1 or 2 of the launcher; `write` accepts no more than the reader has room for."""

    def __init__(self, fd: int) -> None:
        self._socket: socket | None = None
        # Whether writing may block: then write only when poll allows it, and only as much as always
        # fits.
        self._is_careful = False
        self._own_fd = -1
        self.is_closed = False
        # Whether it can be full, so that one waits for `fd`.
        self.can_wait = False
        self.fd = fd
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
            self._use_socket(fd)
        elif stat.S_ISFIFO(mode) or self.is_terminal:
            self._reopen(fd)
        # A file is written through FD itself: position and append mode are shared with others.

    is_terminal = False
    _is_widened = False

    def widen(self) -> None:
        """Enlarge a pipe, once; do nothing for anything else."""
        if self._own_fd < 0 or self.is_terminal or self._is_widened:
            return
        self._is_widened = True
        # A user's share of all pipes' memory may be used up.
        with suppress(OSError):
            if fcntl.fcntl(self.fd, fcntl.F_GETPIPE_SZ) < _PIPE_BYTES:
                fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def _reopen(self, fd: int) -> None:
        # O_NONBLOCK belongs to the open file description, which the user's shell shares; so open
        # the file again.
        self.can_wait = True
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            self._own_fd = self.fd = os.open(f"/proc/self/fd/{fd}", flags)
        except OSError:
            # Another user's terminal (su), or a pipe whose reader is gone.
            self._is_careful = True

    def _use_socket(self, fd: int) -> None:
        import socket  # rare, and 40 ms

        self.can_wait = True
        self._socket = socket.socket(fileno=os.dup(fd))
        self.fd = self._socket.fileno()

    def write(self, data: bytes | memoryview) -> int:
        """Write the beginning of DATA and return its length; set `is_closed` on EPIPE.

        Raises OSError, for example if the disk is full.
        """
        try:
            if self._socket is not None:
                import socket  # loaded already

                return self._socket.send(data, socket.MSG_DONTWAIT)
            if self._is_careful:
                return self._write_carefully(data)
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            self.is_closed = True
            return 0

    def _write_carefully(self, data: bytes | memoryview) -> int:
        has_room = poll(0.0, self.fd, mask=WRITABLE)
        return os.write(self.fd, data[:_PIPE_ROOM]) if has_room else 0

    def close(self) -> None:
        """Close the file that was opened here."""
        if self._own_fd >= 0:
            os.close(self._own_fd)
        if self._socket is not None:
            self._socket.close()
        self.is_closed = True
