"""Host names and TCP connections, without blocking."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, cast

from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import WRITABLE, Waiting, nothing

# A DNS server that is down takes the resolver 30 s and more.
_TIMEOUT_S = 10.0


class Place(NamedTuple):
    """Where to connect to: `name` is what `connect` takes for a socket of FAMILY."""

    family: int
    name: tuple[object, ...]

    @property
    def address(self) -> str:
        """The IP address."""
        return str(self.name[0])

    @property
    def is_loopback(self) -> bool:
        """Whether it is a loopback address."""
        return self.address.startswith(("127.", "::ffff:127.")) or self.address == "::1"


def literal(host: str, port: int) -> tuple[Place, ...]:
    """Return the place of HOST if that is an IP address.

    >>> literal("::1", 80)[0].address, literal("node1", 80)
    ('::1', ())
    """
    return resolve(host, port, _socket.AI_NUMERICHOST)


def resolve(host: str, port: int, flags: int = 0) -> tuple[Place, ...]:
    """Return the places of PORT on HOST; empty for an unknown name. This blocks."""
    # As bytes: for text, Python would import a codec that takes 20 ms.
    encoded = host.encode()
    try:
        entries = _socket.getaddrinfo(encoded, port, 0, _socket.SOCK_STREAM, 0, flags)
    except OSError:
        return ()
    families = (_socket.AF_INET, _socket.AF_INET6)
    places = (Place(int(entry[0]), tuple(entry[4])) for entry in entries if entry[0] in families)
    return tuple(dict.fromkeys(places))


class Lookup:
    """Resolves HOST in a child process; DONE is called once, with () for an unknown name."""

    def __init__(
        self, host: str, port: int, waiting: Waiting, done: Callable[[tuple[Place, ...]], None]
    ) -> None:
        self._host = host
        self._port = port
        self._waiting = waiting
        self._done = done
        self._question: IsolatedCall | None = None

    def begin(self) -> None:
        """Start the lookup."""
        try:
            self._question = IsolatedCall(partial(_ask, self._host, self._port))
        except OSError:
            # No child can be started now; the caller will retry.
            self._done(())
            return
        self._question.watch(self._waiting, self._answered, _TIMEOUT_S)

    def _answered(self, answer: CallResult) -> None:
        self._question = None
        # What the child writes are plain values.
        places = cast("tuple[tuple[int, tuple[object, ...]], ...]", answer.value or ())
        self._done(tuple(Place(family, name) for family, name in places))

    def close(self) -> None:
        """Abandon the lookup."""
        question, self._question = self._question, None
        if question is not None:
            with suppress(OSError):
                question.abandon()


def _ask(host: str, port: int) -> tuple[tuple[int, tuple[object, ...]], ...]:
    return tuple(tuple(place) for place in resolve(host, port))  # type: ignore[misc]


def own_name() -> str:
    """Return the name of this host."""
    return os.uname().nodename


class Link(NamedTuple):
    """A connected socket, and the address of the other end."""

    socket: _socket.socket
    address: str


def plain_address(name: tuple[object, ...]) -> str:
    """Return the IP address in a socket's NAME; IPv4 as such, even on a socket for both.

    >>> plain_address(("::ffff:10.0.0.1", 80, 0, 0)), plain_address(("fe80::1%eth0", 80, 0, 2))
    ('10.0.0.1', 'fe80::1')
    """
    address = str(name[0]).partition("%")[0]
    is_mapped = address.startswith("::ffff:") and "." in address
    return address[7:] if is_mapped else address


class TcpConnect:
    """One attempt to connect to PLACE: DONE is called with the link, or with None and an errno.

    SOURCE is the IPv4 address to connect from; empty: the kernel's choice. Nothing is called after
    `close`; the socket belongs to whoever got the link.
    """

    def __init__(
        self,
        place: Place,
        waiting: Waiting,
        done: Callable[[Link | None, int], None],
        within_s: float,
        source: str = "",
    ) -> None:
        self._waiting = waiting
        self._done = done
        self._socket: _socket.socket | None = None
        kind = _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
        try:
            link = self._socket = _socket.socket(place.family, kind)
            if source and place.family == _socket.AF_INET and not place.is_loopback:
                link.bind((source, 0))
            number = link.connect_ex(place.name)
        except OSError as error:
            # A kernel without IPv6, or no file to spare.
            number = error.errno or errno.EIO
        until = time.monotonic()
        if self._socket is not None and number in {0, errno.EINPROGRESS}:
            number, until = errno.ETIMEDOUT, until + within_s
            waiting.watch(self._socket.fileno(), self._connected, WRITABLE)
        # Never from within the constructor.
        waiting.timer((id(self), "connect"), until, partial(self._fail, number))

    def _connected(self) -> None:
        link = self._socket
        assert link is not None  # it was watched
        try:
            here, there = link.getsockname(), link.getpeername()
        except OSError as error:
            number = link.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
            self._fail(number or error.errno or errno.ENOTCONN)
            return
        if here == there:
            # A caller that was given the very port that it calls reaches itself.
            self._fail(errno.ECONNREFUSED)
            return
        self._forget()
        self._socket = None
        self._done(Link(link, plain_address(there)), 0)

    def _fail(self, number: int) -> None:
        self.close()
        self._done(None, number)

    def _forget(self) -> None:
        self._waiting.timer((id(self), "connect"), None, nothing)
        if self._socket is not None:
            self._waiting.unwatch(self._socket.fileno())

    def close(self) -> None:
        """Give up."""
        self._forget()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
