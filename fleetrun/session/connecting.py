"""Launchers call each other: one listens at a port, the others try its addresses until it answers.

Callers that have not proved themselves are bounded in number, in bytes and in time.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from fleetrun.errors import EnvironmentFault
from fleetrun.host import tcp
from fleetrun.run import isolation
from fleetrun.run.isolation import CallResult
from fleetrun.run.loop import WRITABLE, nothing
from fleetrun.rundir.variables import TOKEN
from fleetrun.session.wire import Connection, Wire

EVERYWHERE = "0.0.0.0"  # noqa: S104 - the other hosts call
# A launcher greets as soon as it is connected; on a bad network it takes seconds.
_GREETING_S = 5.0
# The most connections that have not proved themselves yet; as many wait in the kernel's queue.
_MOST_PENDING = 1024
# The pause while no descriptor is free and the socket stays readable.
_REST_S = 0.1
# How long a connection may take. The kernel would repeat a lost SYN after 1, 3 and 7 s, which is
# late when a network has come back. A DNS server that is down takes the resolver 30 s and more.
_CONNECT_S, _LOOKUP_S = 1.0, 10.0
# The pause between two rounds: hosts that start together find each other at once, and hundreds
# that wait for one do not flood it. After the longest one the name is resolved again.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.02, 1.0, 1.3
# Why there is no connection to an end that has not proved itself.
STRANGER = (
    "it is no fleetrun of this job, or has another version of fleetrun, another --job_id or "
    f"another token ({TOKEN})"
)


def resolve(host: str, flags: int = 0) -> tuple[str, ...]:
    """Return the IPv4 addresses of HOST. This blocks.

    >>> resolve("127.0.0.1", socket.AI_NUMERICHOST), resolve("?")
    (('127.0.0.1',), ())
    """
    try:
        # As bytes: for text, Python would import a codec that takes 20 ms.
        entries = socket.getaddrinfo(host.encode(), 0, socket.AF_INET, socket.SOCK_STREAM, 0, flags)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def reason(error: OSError) -> str:
    """Return the text of ERROR without Python's decoration.

    >>> reason(ConnectionResetError(104, "Connection reset by peer"))
    'connection reset by peer'
    """
    if isinstance(error, TimeoutError):
        return "no answer"
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:]


# Calling ------------------------------------------------------------------------------------------


class Dialer:
    """Calls PORT of HOST until a launcher that knows the key answers; OPENED gets it.

    A round tries every address; after a pause comes the next, until `close`. CLOSED is called when
    nothing listens somewhere.
    """

    def __init__(
        self,
        host: str,
        port: int,
        wire: Wire,
        *,
        opened: Callable[[Connection], None],
        closed: Callable[[], None] = nothing,
    ) -> None:
        self.host, self.port = host, port
        # Why there is no connection yet, empty if unknown.
        self.trouble = ""
        self._wire, self._waiting = wire, wire.waiting
        self._opened, self._closed = opened, closed
        self._pause_s = _FIRST_PAUSE_S
        # As resolved, and what of that is left to try in this round.
        self._literal = self._addresses = resolve(host, socket.AI_NUMERICHOST)
        self._queue: list[str] = []
        # How to give up what is under way.
        self._drop: Callable[[], object] = nothing

    def begin(self) -> None:
        """Call, or call again after a connection was lost; abandon what is under way."""
        self.close()
        self._pause_s = _FIRST_PAUSE_S
        self._round()

    def close(self) -> None:
        """Stop calling; a connection that was handed over belongs to its owner."""
        self._timer(None)
        self._queue.clear()
        drop, self._drop = self._drop, nothing
        drop()

    def _timer(self, seconds: float | None, call: Callable[[], None] = nothing) -> None:
        at = None if seconds is None else time.monotonic() + seconds
        self._waiting.timer((id(self), "next"), at, call)

    def _round(self) -> None:
        """Call every address; a name is resolved in a child process."""
        if self._addresses:
            self._queue = list(self._addresses)
            self._next()
            return
        look = partial(resolve, self.host)
        self._drop = isolation.ask(
            look, self._waiting, self._resolved, _LOOKUP_S, callee="the resolver"
        )

    def _resolved(self, result: CallResult) -> None:
        self._drop = nothing
        resolved: Any = result.value or ()
        self._addresses = resolved
        if not resolved:
            self.trouble = result.trouble or "the name cannot be resolved on this host"
        self._queue = list(resolved)
        self._next()

    def _next(self) -> None:
        """Connect to the next address; after the last one, pause."""
        if not self._queue:
            pause_s = self._pause_s * (0.5 + os.urandom(1)[0] / 512)
            if self._pause_s >= _LONGEST_PAUSE_S:
                self._addresses = self._literal
            self._pause_s = min(self._pause_s * _GROWTH, _LONGEST_PAUSE_S)
            self._timer(pause_s, self._round)
            return
        address = self._queue.pop(0)
        kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        try:
            link = socket.socket(socket.AF_INET, kind)
        except OSError as error:
            # There is no file to spare.
            self._timer(0.0, partial(self._fail, reason(error)))
            return

        def drop() -> None:
            self._waiting.unwatch(link.fileno())
            link.close()

        self._drop = drop
        try:
            number = link.connect_ex((address, self.port))
        except OSError as error:
            number = error.errno or errno.EIO
        if number not in {0, errno.EINPROGRESS}:
            # Never from within `begin`.
            self._timer(0.0, partial(self._refused, number))
            return
        why = f"no answer within {_CONNECT_S:g} s (is a firewall in between?)"
        self._timer(_CONNECT_S, partial(self._fail, why))
        self._waiting.watch(link.fileno(), partial(self._connected, link), WRITABLE)

    def _connected(self, link: socket.socket) -> None:
        number = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            # A caller that was given the very port that it calls reaches itself.
            there = link.getpeername()
            number = number or (errno.ECONNREFUSED if link.getsockname() == there else 0)
        except OSError as error:
            number = number or error.errno or errno.ENOTCONN
        if number:
            self._refused(number)
            return
        self._waiting.unwatch(link.fileno())
        connection = Connection(
            link,
            there[0],
            self._wire,
            is_caller=True,
            ready=self._ready,
            lost=partial(self._fail, STRANGER),
        )
        self._timer(_GREETING_S, connection.lose)
        self._drop = connection.close

    def _refused(self, number: int) -> None:
        self._fail(reason(OSError(number, os.strerror(number))))
        if number == errno.ECONNREFUSED:
            self._closed()

    def _fail(self, why: str) -> None:
        drop, self._drop = self._drop, nothing
        drop()
        self.trouble = why
        self._timer(0.0, self._next)

    def _ready(self, connection: Connection) -> None:
        self._drop = nothing
        self.close()
        self.trouble = ""
        self._opened(connection)


# Listening ----------------------------------------------------------------------------------------


class PortTaken(EnvironmentFault):
    """Another process listens there; the message names it."""


class Listener:
    """Listens at PORT of ADDRESSES, and passes each caller who knows the key to OPENED.

    `allowed` are the addresses that may connect; None: all. REFUSED gets the address of each
    refused connection, and the reason.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        wire: Wire,
        *,
        opened: Callable[[Connection], None],
        refused: Callable[[str, str], None] = lambda _address, _why: None,
        allowed: Collection[str] | None = None,
        most_pending: int = _MOST_PENDING,
        greeting_s: float = _GREETING_S,
    ) -> None:
        self._addresses, self._port = addresses, port
        self._wire, self._waiting = wire, wire.waiting
        self._opened, self._refused, self._allowed = opened, refused, allowed
        self._most_pending, self._greeting_s = most_pending, greeting_s
        self._sockets: list[socket.socket] = []
        # Those that have not proved themselves yet, the oldest first.
        self.pending: list[Connection] = []

    def prepare(self) -> None:
        """Bind the port; raises PortTaken, or EnvironmentFault if an address cannot be bound."""
        try:
            for address in self._addresses:
                self._sockets.append(_bound(address, self._port))
        except OSError as error:
            self._free()
            use = "to which the other hosts' launchers connect,"
            if error.errno == errno.EADDRINUSE:
                holder = tcp.holder(self._port) or tcp.STRANGER
                raise PortTaken(
                    f"Port {self._port}, {use} is taken by {holder}. Stop it, or give another "
                    "port, the same on every host."
                ) from None
            raise EnvironmentFault(
                f"Port {self._port} of {address}, {use} cannot be used: {error.strerror}."
            ) from None

    def open(self) -> None:
        """Begin to accept calls."""
        for server in self._sockets:
            self._waiting.watch(server.fileno(), partial(self._answer, server))

    def close(self) -> None:
        """Stop accepting calls; connections that have proved themselves belong to their owners."""
        self._rest(None)
        for caller in list(self.pending):
            self._discard(caller)
            caller.close()
        self._free()

    def _rest(self, seconds: float | None) -> None:
        for server in self._sockets:
            self._waiting.unwatch(server.fileno())
        at = None if seconds is None else time.monotonic() + seconds
        self._waiting.timer((id(self), "rest"), at, self.open)

    def _free(self) -> None:
        for server in self._sockets:
            server.close()
        self._sockets.clear()

    def _answer(self, server: socket.socket) -> None:
        try:
            link, (address, _) = server.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # There is no file to spare.
            self._drop_oldest()
            self._rest(_REST_S)
            return
        if self._allowed is not None and address not in self._allowed:
            link.close()
            self._refused(address, "it is not an address of this job's hosts")
            return
        if len(self.pending) >= self._most_pending:
            self._drop_oldest()
        caller = Connection(
            link,
            address,
            self._wire,
            is_caller=False,
            ready=self._ready,
            lost=lambda: self._failed(caller),
        )
        self.pending.append(caller)
        at = time.monotonic() + self._greeting_s
        self._waiting.timer((id(self), id(caller)), at, caller.lose)

    def _drop_oldest(self) -> None:
        if self.pending:
            self.pending[0].lose()

    def _discard(self, caller: Connection) -> None:
        self.pending.remove(caller)
        self._waiting.timer((id(self), id(caller)), None, self.open)

    def _ready(self, caller: Connection) -> None:
        self._discard(caller)
        self._opened(caller)

    def _failed(self, caller: Connection) -> None:
        self._discard(caller)
        # Whoever only looks whether the port is open is no stranger with another token.
        self._refused(caller.address, "hung up" if caller.has_looked else STRANGER)


def _bound(address: str, port: int) -> socket.socket:
    """Return a socket that listens at PORT of ADDRESS."""
    kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    server = socket.socket(socket.AF_INET, kind)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(_MOST_PENDING)
    except OSError:
        server.close()
        raise
    return server
