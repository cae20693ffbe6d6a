"""Launchers call each other: one listens at a port, the others try its addresses until it answers.

Callers that have not proved themselves are bounded in number, in bytes and in time.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from fleetrun.errors import EnvironmentFault
from fleetrun.host import tcp
from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import WRITABLE, nothing
from fleetrun.rundir.variables import TOKEN
from fleetrun.session.wire import Connection, Wire, ignore

EVERYWHERE = "0.0.0.0"  # noqa: S104 - the other hosts call
# A launcher greets as soon as it is connected; on a bad network it takes seconds.
_GREETING_S = 5.0
# The most connections that have not proved themselves yet; as many wait in the kernel's queue.
_MOST_PENDING = 1024
# How long a connection may take. The kernel would repeat a lost SYN after 1, 3 and 7 s, which is
# late when a network has come back. A DNS server that is down takes the resolver 30 s and more.
_CONNECT_S, _LOOKUP_S = 1.0, 10.0
# The pause between two rounds: hosts that start together find each other at once, and hundreds
# that wait for one do not flood it.
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


class Dialer:
    """Calls PORT of HOST until a launcher that knows the key answers; OPENED gets it.

    A round tries every address; after a pause comes the next, until `close`.
    """

    def __init__(
        self, host: str, port: int, wire: Wire, *, opened: Callable[[Connection], None]
    ) -> None:
        self._host, self._port = host, port
        # Why there is no connection yet, empty if unknown.
        self.trouble = ""
        self._wire, self._waiting = wire, wire.waiting
        self._opened = opened
        self._pause_s = _FIRST_PAUSE_S
        self._literal = resolve(host, socket.AI_NUMERICHOST)
        # What is left to try in this round.
        self._queue: list[str] = []
        # How to give up what is under way.
        self._drop: Callable[[], object] = nothing

    def __str__(self) -> str:
        return f"{self._host}:{self._port}: {self.trouble or 'no answer yet'}"

    def begin(self) -> None:
        """Call, or call again after a connection was lost; abandon what is under way."""
        self.close()
        self._queue = []
        self._next()

    def close(self) -> None:
        """Stop calling; a connection that was handed over belongs to its owner."""
        self._timer(None)
        drop, self._drop = self._drop, nothing
        drop()

    def _timer(self, seconds: float | None, call: Callable[[], None] = nothing) -> None:
        at = None if seconds is None else time.monotonic() + seconds
        self._waiting.timer((id(self), "next"), at, call)

    def _round(self) -> None:
        if self._literal:
            self._resolved(CallResult(self._literal))
            return
        look = partial(resolve, self._host)
        self._drop = IsolatedCall(look).watch(
            self._waiting, self._resolved, _LOOKUP_S, callee="the resolver"
        )

    def _resolved(self, result: CallResult) -> None:
        self._drop = nothing
        addresses: Any = result.value or ()
        if not addresses:
            self.trouble = result.trouble or "the name cannot be resolved on this host"
        self._queue = list(addresses)
        self._next()

    def _next(self) -> None:
        if not self._queue:
            self._timer(self._pause_s * (0.5 + os.urandom(1)[0] / 512), self._round)
            self._pause_s = min(self._pause_s * _GROWTH, _LONGEST_PAUSE_S)
            return
        address = self._queue.pop(0)
        why = f"no answer within {_CONNECT_S:g} s (is a firewall in between?)"
        self._timer(_CONNECT_S, partial(self._fail, why))
        try:
            link = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._drop = partial(self._discard, link)
            self._waiting.watch(link.fileno(), partial(self._connected, link, address), WRITABLE)
            link.connect((address, self._port))
        except BlockingIOError:
            pass
        except OSError as error:
            self.close()
            # Never from within `begin`.
            self._timer(0.0, partial(self._refused, error))

    def _discard(self, link: socket.socket) -> None:
        self._waiting.unwatch(link.fileno())
        link.close()

    def _connected(self, link: socket.socket, address: str) -> None:
        if number := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._refused(OSError(number, os.strerror(number)))
            return
        self._waiting.unwatch(link.fileno())
        ready, lost = self._ready, partial(self._fail, STRANGER)
        connection = Connection(link, address, self._wire, is_caller=True, ready=ready, lost=lost)
        self._timer(_GREETING_S, connection.lose)
        self._drop = connection.close

    def _refused(self, error: OSError) -> None:
        self._fail((error.strerror or str(error)).lower())

    def _fail(self, why: str) -> None:
        self.close()
        self.trouble = why
        self._timer(0.0, self._next)

    def _ready(self, connection: Connection) -> None:
        self._drop = nothing
        self.close()
        self.trouble = ""
        self._opened(connection)


class PortTaken(EnvironmentFault):
    """Another process listens there; the message names it."""


class Listener:
    """Listens at PORT of ADDRESS, and once open, passes on each caller who knows the key.

    `allowed` are the addresses that may connect; None: all. REFUSED gets a sentence about each that
    may not. Raises PortTaken, or EnvironmentFault if the port cannot be bound.
    """

    most_pending, greeting_s = _MOST_PENDING, _GREETING_S

    def __init__(
        self,
        address: str,
        port: int,
        wire: Wire,
        *,
        refused: Callable[[str], None],
        allowed: Collection[str] | None = None,
    ) -> None:
        self._wire, self._waiting = wire, wire.waiting
        self._refused, self._allowed = refused, allowed
        # Those that have not proved themselves yet, the oldest first.
        self.pending: list[Connection] = []
        self._opened: Callable[[Connection], None] = ignore
        try:
            self._socket = socket.create_server((address, port), backlog=_MOST_PENDING)
        except OSError as error:
            use = "to which the other hosts' launchers connect,"
            if error.errno == errno.EADDRINUSE:
                holder = tcp.holder(port) or tcp.STRANGER
                raise PortTaken(
                    f"Port {port}, {use} is taken by {holder}. Stop it, or give another port, the "
                    "same on every host."
                ) from None
            why = os.strerror(error.errno or errno.EIO)
            raise EnvironmentFault(
                f"Port {port} of {address}, {use} cannot be used: {why}."
            ) from None
        self._socket.settimeout(0)

    def open(self, opened: Callable[[Connection], None]) -> None:
        """Begin to accept calls; OPENED gets the callers."""
        self._opened = opened
        self._waiting.watch(self._socket.fileno(), self._answer)

    def close(self) -> None:
        """Stop accepting calls; connections that have proved themselves belong to their owners."""
        self._waiting.unwatch(self._socket.fileno())
        self._socket.close()
        for caller in list(self.pending):
            self._discard(caller)
            caller.close()

    def _answer(self) -> None:
        try:
            link, (address, _) = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # There is no file to spare.
            if self.pending:
                self.pending[0].lose()
            return
        if self._allowed is not None and address not in self._allowed:
            link.close()
            self._refuse(address, "it is not an address of this job's hosts")
            return
        if len(self.pending) >= self.most_pending:
            self.pending[0].lose()
        ready = self._ready
        caller = Connection(link, address, self._wire, is_caller=False, ready=ready, lost=nothing)
        caller.lost = partial(self._failed, caller)
        self.pending.append(caller)
        at = time.monotonic() + self.greeting_s
        self._waiting.timer((id(self), id(caller)), at, caller.lose)

    def _discard(self, caller: Connection) -> None:
        self.pending.remove(caller)
        self._waiting.timer((id(self), id(caller)), None, nothing)

    def _ready(self, caller: Connection) -> None:
        self._discard(caller)
        self._opened(caller)

    def _failed(self, caller: Connection) -> None:
        self._discard(caller)
        # Who only looks whether the port is open is no stranger with another token.
        if caller.has_heard:
            self._refuse(caller.address, STRANGER)

    def _refuse(self, address: str, why: str) -> None:
        self._refused(f"A connection from {address} was refused: {why}")
