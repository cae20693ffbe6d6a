"""Resolves host names without blocking."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from fleetrun.run.isolation import IsolatedCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.run.isolation import CallResult
    from fleetrun.run.loop import Waiting

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
