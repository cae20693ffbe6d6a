"""Accepts connections of other launchers, with bounds for those that have not proved themselves."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from fleetrun.errors import EnvironmentFault
from fleetrun.host import tcp
from fleetrun.run.tcpconnect import Link, plain_address
from fleetrun.session.connection import Connection, Wire

EVERYWHERE = "0.0.0.0"  # noqa: S104 - the other hosts call
# A launcher introduces itself as soon as it is connected; on a bad network it takes seconds.
_INTRODUCTION_S = 5.0
# The most connections that are not authenticated yet: 512 launchers may call at once. As many wait
# in the kernel's queue, and so many are accepted in one turn of the loop.
_MOST_PENDING, _BACKLOG, _MOST_AT_ONCE = 1024, 1024, 64
# For SO_LINGER: a closed socket is gone at once, without TIME_WAIT.
_AT_ONCE = struct.pack("ii", 1, 0)
# The pause while no descriptor is free and the socket stays readable.
_PAUSE_S = 0.1
_NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class PortTaken(EnvironmentFault):
    """Another process, `holder`, listens there; the message names it, too."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class Listener:
    """Listens at one of PORTS of ADDRESSES, and passes each caller who knows the key to OPENED.

    `allowed` are the addresses that may connect; None: all. REFUSED gets the address of each
    refused connection, and the reason.
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
        # The one that was free, after `prepare`.
        self.port = ports[0]
        self._addresses, self._ports, self._wire = addresses, ports, wire
        self._waiting = wire.waiting
        self._opened, self._refused, self._allowed = opened, refused, allowed
        self._most_pending, self._introduction_s = most_pending, introduction_s
        self._sockets: list[socket.socket] = []
        # Those that are not authenticated yet, the oldest first.
        self._pending: dict[Connection, None] = {}

    @property
    def pending(self) -> int:
        """The number of connections that are not authenticated yet."""
        return len(self._pending)

    def prepare(self) -> None:
        """Bind the first port that is free on all addresses.

        Raises PortTaken if none is, EnvironmentFault if an address cannot be bound.
        """
        for port in self._ports:
            if self._bind(port):
                self.port = port
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
            server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)

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
        for server in self._sockets:
            self._waiting.watch(server.fileno(), partial(self._answer, server))

    def close(self) -> None:
        """Stop accepting calls; authenticated connections belong to their owners."""
        self._rest()
        self._waiting.timer((id(self), "pause"), None, self.open)
        for caller in list(self._pending):
            self._discard(caller)
            caller.close()
        self._free()

    def _rest(self) -> None:
        for server in self._sockets:
            self._waiting.unwatch(server.fileno())

    def _free(self) -> None:
        for server in self._sockets:
            server.close()
        self._sockets.clear()

    def _answer(self, server: socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                link, name = server.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NO_FILES:
                    # The connection is closed already.
                    continue
                if self._pending:
                    self._drop(next(iter(self._pending)), "no more files can be open here")
                self._rest()
                self._waiting.timer((id(self), "pause"), time.monotonic() + _PAUSE_S, self.open)
                return
            self._admit(link, plain_address(name))

    def _admit(self, link: socket.socket, address: str) -> None:
        if self._allowed is not None and address not in self._allowed:
            link.close()
            self._refused(address, "is not an address of this job's hosts")
            return
        if len(self._pending) >= self._most_pending:
            # A flood displaces only itself: the oldest of the address with the most.
            (most, _), *_ = Counter(caller.address for caller in self._pending).most_common(1)
            oldest = next(caller for caller in self._pending if caller.address == most)
            self._drop(oldest, "was dropped in favour of newer callers")
        ends = Link(link, address)
        caller = Connection(
            ends, self._wire, is_caller=False, ready=self._ready, failed=self._failed
        )
        self._pending[caller] = None
        until = time.monotonic() + self._introduction_s
        late = partial(self._drop, caller, "sent no valid greeting in time")
        self._waiting.timer((id(self), caller), until, late)

    def _discard(self, caller: Connection) -> None:
        self._pending.pop(caller, None)
        self._waiting.timer((id(self), caller), None, self.open)

    def _drop(self, caller: Connection, why: str) -> None:
        self._discard(caller)
        caller.lose(why)

    def _ready(self, caller: Connection) -> None:
        self._discard(caller)
        self._opened(caller)

    def _failed(self, caller: Connection, why: str) -> None:
        self._discard(caller)
        self._refused(caller.address, why)


def _bound(address: str, port: int) -> socket.socket:
    """Return a socket that listens at PORT of ADDRESS; `::` means IPv4, too."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
        server.bind((address, port))
        server.listen(_BACKLOG)
    except OSError:
        server.close()
        raise
    return server
