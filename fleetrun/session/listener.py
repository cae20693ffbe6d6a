"""Accepts connections of other launchers, with bounds for unauthenticated ones."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
import os
import struct
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from fleetrun.errors import EnvironmentFault
from fleetrun.host import tcp
from fleetrun.run.tcpconnect import Link, plain_address
from fleetrun.session.callers import PendingCallers
from fleetrun.session.connection import Connection, Wire

EVERYWHERE = "0.0.0.0"  # noqa: S104 - the other hosts call
# A launcher introduces itself as soon as it is connected; on a bad network it takes seconds.
_INTRODUCTION_S = 5.0
# The most connections that are not authenticated yet.
_MOST_PENDING = 1024
# The length of the kernel's queue of callers: 512 launchers may call at once.
_BACKLOG = 1024
# The most connections accepted in one turn of the loop.
_MOST_AT_ONCE = 64
# For SO_LINGER: a closed socket is gone at once, without TIME_WAIT.
_AT_ONCE = struct.pack("ii", 1, 0)
# The pause while no descriptor is free and the socket stays readable.
_PAUSE_S = 0.1


class PortTaken(EnvironmentFault):
    """Another process, `holder`, listens there; the message names it, too."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class Listener:
    """Listens at one of PORTS of ADDRESSES, and passes each caller who knows KEY to OPENED.

    `allowed` are the addresses that may connect; None: all. REFUSED gets the address of each
    refused connection, and the reason; it occupies a pending place for seconds at most.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        ports: Sequence[int],
        wire: Wire,
        *,
        opened: Callable[[Connection], None],
        refused: Callable[[str, str], None] = lambda _address, _why: None,
        allowed: Collection[str] | None = None,
        most_pending: int = _MOST_PENDING,
        introduction_s: float = _INTRODUCTION_S,
    ) -> None:
        self.allowed = allowed
        self._addresses = addresses
        self._ports = ports
        # The one that was free, after `prepare`.
        self.port = ports[0]
        self._wire = wire
        self._waiting = wire.waiting
        self._opened = opened
        self._refused = refused
        self._most_pending = most_pending
        self._introduction_s = introduction_s
        self._sockets: list[_socket.socket] = []
        # The unauthenticated connections, once it is open.
        self._pending: PendingCallers | None = None
        # A descriptor to give up when none is left to accept a call.
        self._spare_fd = -1

    @property
    def pending(self) -> int:
        """The number of connections that are not authenticated yet."""
        return 0 if self._pending is None else len(self._pending)

    def prepare(self) -> None:
        """Bind the first port that is free on all addresses.

        Raises PortTaken if none is, EnvironmentFault if an address cannot be bound.
        """
        for port in self._ports:
            if self._bind(port):
                self.port = port
                self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                return

        first, last = self._ports[0], self._ports[-1]
        holder = tcp.holder(first) or "a process that only root can identify"
        ports = f"Port {first}" if first == last else f"Each port from {first} to {last}"
        raise PortTaken(
            f"{ports}, to which the other hosts' launchers connect, is taken ({first} by "
            f"{holder}). Stop it, or give another port, the same on every host.",
            holder,
        )

    def hold(self) -> None:
        """Bind every free port, such that accepted connections do not block it afterwards."""
        for port in self._ports:
            for address in self._addresses:
                self._refusal(address, port)
        for server in self._sockets:
            # Accepted sockets inherit it.
            server.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, _AT_ONCE)

    def _bind(self, port: int) -> bool:
        for address in self._addresses:
            refusal = self._refusal(address, port)
            if refusal is not None:
                self._free()
                if refusal.errno == errno.EADDRINUSE:
                    return False
                raise EnvironmentFault(
                    f"Port {port} of {address}, to which the other hosts' launchers connect, "
                    f"cannot be used: {refusal.strerror}."
                )
        return True

    def _refusal(self, address: str, port: int) -> OSError | None:
        try:
            self._sockets.append(_bound(address, port))
        except OSError as error:
            return error
        return None

    def open(self) -> None:
        """Begin to accept calls."""
        self._pending = PendingCallers(self._waiting, self._most_pending, self._introduction_s)
        self._watch()

    def close(self) -> None:
        """Stop accepting calls; authenticated connections belong to their owners."""
        if self._pending is not None:
            for server in self._sockets:
                self._waiting.unwatch(server.fileno())
            self._waiting.timer((id(self), "pause"), None, self._watch)
            self._pending.close()
        self._free()

    def _free(self) -> None:
        for server in self._sockets:
            server.close()
        self._sockets.clear()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1

    def _watch(self) -> None:
        for server in self._sockets:
            self._waiting.watch(server.fileno(), partial(self._answer, server))

    def _answer(self, server: _socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                # socket.accept adds but a wrapper.
                fd, name = getattr(server, "_accept")()  # noqa: B009
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._without_files(server)
                    return
                # The connection is closed already.
                continue
            self._admit(_socket.socket(fileno=fd), plain_address(name))

    def _without_files(self, server: _socket.socket) -> None:
        """Free a descriptor: refuse the oldest pending connection, or else the new one."""
        if self._pending:
            self._pending.drop_oldest("no more files can be open here")
            return
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            with suppress(OSError):
                fd, _ = getattr(server, "_accept")()  # noqa: B009 - as above
                os.close(fd)
            self._spare_fd = -1
        # Closing above freed one; if it was taken again, try later.
        with suppress(OSError):
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for listening in self._sockets:
            self._waiting.unwatch(listening.fileno())
        self._waiting.timer((id(self), "pause"), time.monotonic() + _PAUSE_S, self._watch)

    def _admit(self, link: _socket.socket, address: str) -> None:
        if self.allowed is not None and address not in self.allowed:
            link.close()
            self._refused(address, "is not an address of this job's hosts")
            return
        try:
            local = plain_address(link.getsockname())
        except OSError:
            link.close()
            return
        caller = Connection(
            Link(link, address, local),
            self._wire,
            is_caller=False,
            ready=self._ready,
            failed=self._failed,
        )
        assert self._pending is not None  # see `open`
        self._pending.add(caller)

    def _ready(self, caller: Connection) -> None:
        assert self._pending is not None  # see `open`
        self._pending.discard(caller)
        self._opened(caller)

    def _failed(self, caller: Connection, why: str) -> None:
        assert self._pending is not None  # see `open`
        self._pending.discard(caller)
        self._refused(caller.address, why)


def _bound(address: str, port: int) -> _socket.socket:
    """Return a socket that listens at PORT of ADDRESS; `::` means IPv4, too."""
    family = _socket.AF_INET6 if ":" in address else _socket.AF_INET
    kind = _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
    server = _socket.socket(family, kind)
    try:
        server.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if family == _socket.AF_INET6:
            server.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, int(address != "::"))
        server.bind((address, port))
        server.listen(_BACKLOG)
    except OSError:
        server.close()
        raise
    return server
