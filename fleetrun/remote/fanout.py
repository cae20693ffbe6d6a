"""Runs programs on several hosts at once, each by its own ssh, in one loop."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Generic, TypeVar

from fleetrun.plan.visible import visible
from fleetrun.remote import protocol
from fleetrun.remote.sshconnection import FILES, SSH_FAULT, SshConnection
from fleetrun.run.descriptors import FileLimit
from fleetrun.run.loop import WRITABLE, Loop, nothing
from fleetrun.sinks.outlet import Outlet

_CHUNK = 1 << 16
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# How much of a stream is buffered before its source is paused.
_MOST = 1 << 20
# How long the last lines wait for a reader that is stuck.
_TIMEOUT_S = 2.0

Connection = TypeVar("Connection", bound=SshConnection)


class Outlets:
    """Standard output and error, buffered so that the head never waits for its reader."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._outlets = {fd: Outlet(fd) for fd in (1, 2)}
        self._rest = {1: b"", 2: b""}
        self._paused: dict[int, dict[int, Callable[[], None]]] = {1: {}, 2: {}}

    def put(self, fd: int, data: bytes, source: int, resume: Callable[[], None]) -> None:
        """Write DATA to FD; while too much is buffered, pause SOURCE, then watch it by RESUME."""
        self._rest[fd] += data
        self._pump(fd)
        if len(self._rest[fd]) > _MOST and source >= 0:
            self._loop.unwatch(source)
            self._paused[fd][source] = resume

    def _pump(self, fd: int) -> None:
        outlet = self._outlets[fd]
        while self._rest[fd] and not outlet.is_closed:
            try:
                taken = outlet.write(self._rest[fd])
            except OSError:
                # The disk is full, and there is nowhere else to report it.
                taken = len(self._rest[fd])
            self._rest[fd] = self._rest[fd][taken:]
            if not taken:
                break
        if outlet.is_closed:
            self._rest[fd] = b""
        if self._rest[fd] and outlet.can_wait:
            self._loop.watch(outlet.fd, lambda: self._pump(fd), WRITABLE)
        elif outlet.can_wait:
            self._loop.unwatch(outlet.fd)
        if len(self._rest[fd]) <= _MOST:
            paused, self._paused[fd] = self._paused[fd], {}
            for source, resume in paused.items():
                self._loop.watch(source, resume)

    def drain(self) -> None:
        """Wait briefly for readers to take the rest."""
        until = time.monotonic() + _TIMEOUT_S
        self._loop.timer(self, until, lambda: None)
        while any(self._rest.values()) and time.monotonic() < until:
            self._loop.turn()


class Fanout(Generic[Connection]):
    """The loop over CONNECTIONS, of which MOST are open at a time.

    Subclasses handle output, ends and signals.
    """

    def __init__(self, connections: Sequence[Connection], most: int) -> None:
        self._all = tuple(connections)
        self._unstarted = list(connections)
        self._has_place: set[Connection] = set()
        self._most = most
        self._loop = Loop()
        self._outlets = Outlets(self._loop)
        # The first signal that was caught.
        self.signum: int | None = None

    def run(self) -> None:
        """Run until all have ended; signals are caught meanwhile."""
        files = FileLimit(len(self._all), per_process=FILES, label="hosts by ssh")
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous_fd = signal.set_wakeup_fd(write_fd)
        previous = {number: signal.signal(number, _nothing) for number in _CAUGHT}
        self._loop.watch(read_fd, lambda: self._caught(read_fd))
        try:
            self._connect()
            self._beat()
            while self._unstarted or any(connection.is_running for connection in self._all):
                self._loop.turn()
            self._finish()
            self._outlets.drain()
        finally:
            for connection in self._all:
                connection.close()
            self._loop.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(read_fd)
            os.close(write_fd)
            files.restore()

    # For subclasses -------------------------------------------------------------------------------

    def _started(self, connection: Connection) -> None:
        """Handle the start of CONNECTION."""

    def _heard(self, connection: Connection, fd: int, part: bytes) -> None:
        """Handle PART of CONNECTION's output (FD 1) or errors (2); an empty part is the end."""
        raise NotImplementedError

    def _ended(self, connection: Connection) -> None:
        """Handle the end of CONNECTION, after all of its output."""

    def _interrupted(self, number: int) -> None:
        """Handle the signal NUMBER."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Print the final lines."""

    # ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Start as many connections as may be open."""
        while self._unstarted and len(self._has_place) < self._most:
            connection = self._unstarted.pop(0)
            try:
                connection.start(self._loop)
            except OSError as error:
                connection.last = f"it cannot be started here ({error.strerror})"
                connection.code = SSH_FAULT
                self._ended(connection)
                continue
            self._has_place.add(connection)
            for fd in (1, 2):
                self._loop.watch(connection.stream(fd), partial(self._read, connection, fd))
            self._loop.watch(connection.pidfd, partial(self._reap, connection))
            self._started(connection)

    def _release(self, connection: Connection) -> None:
        """Start the next connection in place of CONNECTION."""
        self._has_place.discard(connection)
        self._connect()

    def _beat(self) -> None:
        for connection in self._all:
            connection.beat()
        self._loop.timer("heartbeat", time.monotonic() + protocol.HEARTBEAT_S, self._beat)

    def _read(self, connection: Connection, fd: int) -> None:
        stream = connection.stream(fd)
        try:
            part = os.read(stream, _CHUNK)
        except OSError:
            part = b""
        if not part or connection.fault:
            self._loop.unwatch(stream)
        self._heard(connection, fd, part)

    def _reap(self, connection: Connection) -> None:
        self._loop.unwatch(connection.pidfd)
        self._loop.timer(connection, None, nothing)
        connection.hang_up()
        # Its last output is still in the pipes.
        for fd in (1, 2):
            while not connection.fault and _has_more(connection.stream(fd)):
                self._read(connection, fd)
            self._heard(connection, fd, b"")
            self._loop.unwatch(connection.stream(fd))
        connection.reap()
        self._release(connection)
        self._ended(connection)

    def _show(self, connection: Connection, fd: int, part: bytes) -> None:
        """Print the lines that PART completes in stream FD of CONNECTION, after the host's name."""
        prefix = f"[{connection.host.name}] ".encode()
        shown = b"".join(prefix + line + b"\n" for line in connection.lines(fd, part))
        if shown:
            self._put(connection, fd, shown, is_last=not part)

    def _put(self, connection: Connection, fd: int, shown: bytes, *, is_last: bool = False) -> None:
        """Write SHOWN, from stream FD of CONNECTION; pause the stream for a slow reader."""
        source = -1 if is_last else connection.stream(fd)
        self._outlets.put(fd, shown, source, partial(self._read, connection, fd))

    def _log(self, text: str) -> None:
        self._outlets.put(2, f"fleetrun: {visible(text)}\n".encode(), -1, nothing)

    def _caught(self, fd: int) -> None:
        for number in os.read(fd, 64):
            self.signum = self.signum or number
            self._interrupted(number)


def _has_more(fd: int) -> bool:
    """Whether FD has unread input."""
    count = fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4)
    return bool(int.from_bytes(count, sys.byteorder))


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    """Let the signal arrive through the wake-up pipe."""
