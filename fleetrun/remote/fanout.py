"""Runs programs on several hosts at a time, each by its own ssh, in one loop."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from fleetrun.plan.visible import visible
from fleetrun.remote import protocol
from fleetrun.remote.sshconnection import FILES, SSH_FAULT, SshConnection
from fleetrun.run.descriptors import FileLimit
from fleetrun.run.loop import WRITABLE, Loop, nothing
from fleetrun.sinks.outlet import Outlet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

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
                # A full disk: there is nowhere to report that.
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
        previous = {one: signal.signal(one, _nothing) for one in _CAUGHT}
        self._loop.watch(read_fd, lambda: self._caught(read_fd))
        try:
            self._connect()
            self._beat()
            while self._unstarted or any(one.is_running for one in self._all):
                self._loop.turn()
            self._finish()
            self._outlets.drain()
        finally:
            for one in self._all:
                one.close()
            self._loop.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(read_fd)
            os.close(write_fd)
            files.restore()

    # What subclasses say -------------------------------------------------------------------------

    def _started(self, one: Connection) -> None:
        """Handle the start of ONE."""

    def _heard(self, one: Connection, fd: int, part: bytes) -> None:
        """Handle PART of the output (FD 1) or errors (2) of ONE; an empty part is the end."""
        raise NotImplementedError

    def _ended(self, one: Connection) -> None:
        """Handle the end of ONE, after all of its output."""

    def _interrupted(self, number: int) -> None:
        """Handle the signal NUMBER."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Print what is to be printed at the end."""

    # ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Start as many connections as may be open."""
        while self._unstarted and len(self._has_place) < self._most:
            one = self._unstarted.pop(0)
            try:
                one.start(self._loop)
            except OSError as error:
                one.last = f"it cannot be started here ({error.strerror})"
                one.code = SSH_FAULT
                self._ended(one)
                continue
            self._has_place.add(one)
            for fd in (1, 2):
                self._loop.watch(one.stream(fd), partial(self._read, one, fd))
            self._loop.watch(one.pidfd, partial(self._reap, one))
            self._started(one)

    def _release(self, one: Connection) -> None:
        """Give the place of ONE to the next."""
        self._has_place.discard(one)
        self._connect()

    def _beat(self) -> None:
        for one in self._all:
            one.beat()
        self._loop.timer("heartbeat", time.monotonic() + protocol.HEARTBEAT_S, self._beat)

    def _read(self, one: Connection, fd: int) -> None:
        stream = one.stream(fd)
        try:
            part = os.read(stream, _CHUNK)
        except OSError:
            part = b""
        if not part or one.fault:
            self._loop.unwatch(stream)
        self._heard(one, fd, part)

    def _reap(self, one: Connection) -> None:
        self._loop.unwatch(one.pidfd)
        self._loop.timer(one, None, nothing)
        one.hang_up()
        # Its last output is still in the pipes.
        for fd in (1, 2):
            while not one.fault and _has_more(one.stream(fd)):
                self._read(one, fd)
            self._heard(one, fd, b"")
            self._loop.unwatch(one.stream(fd))
        one.reap()
        self._release(one)
        self._ended(one)

    def _show(self, one: Connection, fd: int, part: bytes, *, has_name: bool = True) -> None:
        """Print the lines that PART completes in the stream FD of ONE, with its host's name."""
        prefix = f"[{one.host.name}] ".encode() if has_name else b""
        shown = b"".join(prefix + line + b"\n" for line in one.lines(fd, part))
        if shown:
            self._put(one, fd, shown, is_last=not part)

    def _put(self, one: Connection, fd: int, shown: bytes, *, is_last: bool = False) -> None:
        """Write SHOWN, of the stream FD of ONE, which is paused for a slow reader."""
        source = -1 if is_last else one.stream(fd)
        self._outlets.put(fd, shown, source, partial(self._read, one, fd))

    def _say(self, text: str) -> None:
        self._outlets.put(2, f"fleetrun: {visible(text)}\n".encode(), -1, nothing)

    def _caught(self, fd: int) -> None:
        for number in os.read(fd, 64):
            self.signum = self.signum or number
            self._interrupted(number)


def _has_more(fd: int) -> bool:
    """Whether FD has unread input."""
    import fcntl  # only at an end
    import termios

    count = fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4)
    return bool(int.from_bytes(count, sys.byteorder))


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    """Let the signal arrive through the wake-up pipe."""
