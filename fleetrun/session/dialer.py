"""Connects to another launcher by trying all of its possible addresses until one answers."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from fleetrun.run.tcpconnect import (
    Link,
    Lookup,
    Place,
    TcpConnect,
    literal,
    own_name,
)
from fleetrun.session.connection import HUNG_UP, Connection, Wire, reason

# A firewall may drop packets; the next address is tried after this.
_NEXT_S = 0.25
# How long a connection and then the handshake may take. The kernel would repeat a lost SYN after
# 1, 3 and 7 s, which is late when a network has come back.
_CONNECT_S, _INTRODUCTION_S = 1.0, 5.0
# The pause between two rounds: hosts that start together find each other at once, and thousands
# that wait for one do not flood it. After the longest one names are resolved again.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.02, 1.0, 1.3
# How a call failed: the TCP connection was refused, or nothing came back, or whatever accepted it
# did not prove to belong to this job.
REFUSED, SILENT, OTHER = "refused", "silent", "another program"


class Target(NamedTuple):
    """Where a launcher is expected, as the user has named it."""

    host: str
    port: int

    def __str__(self) -> str:
        """HOST:PORT, with brackets around IPv6.

        >>> str(Target("::1", 80)), str(Target("node1", 80))
        ('[::1]:80', 'node1:80')
        """
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def in_words(troubles: Mapping[Target, str]) -> str:
    """Return TROUBLES as text, grouped by host and reason.

    >>> in_words({Target("a", 1): "no answer", Target("a", 2): "no answer"})
    'a:1, 2: no answer'
    """
    alike: dict[tuple[str, str], list[Target]] = {}
    for target, why in troubles.items():
        alike.setdefault((target.host, why), []).append(target)
    return "; ".join(
        f"{', '.join([str(targets[0]), *(str(target_.port) for target_ in targets[1:])])}: {why}"
        for (_, why), targets in alike.items()
    )


class Dialer:
    """Calls TARGETS in turn until a launcher that knows the key answers; OPENED gets it.

    A round tries every address of every target; after a pause comes the next, until `close`. CLOSED
    is called with each address and port where nothing listens.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        wire: Wire,
        *,
        opened: Callable[[Connection], None],
        closed: Callable[[Target], None] = lambda _: None,
    ) -> None:
        self._targets, self._wire, self._waiting = tuple(targets), wire, wire.waiting
        self._opened, self._closed = opened, closed
        self._connection: Connection | None = None
        self._is_begun = False
        self._pause_s = _FIRST_PAUSE_S
        self._places: dict[Target, tuple[Place, ...]] = {}
        self._lookups: dict[Target, Lookup] = {}
        self._queue: list[tuple[Target, Place]] = []
        self._attempts: list[_Attempt] = []
        # The last failure of each target, as text and kind.
        self.troubles: dict[Target, str] = {}
        self.outcomes: dict[Target, str] = {}

    @property
    def trouble(self) -> str:
        """Return why there is no connection yet, with address and port; empty if unknown."""
        return in_words(self.troubles)

    def begin(self) -> None:
        """Call, or call again after a connection was lost; abandon what is under way."""
        self.hang_up()
        self._is_begun = True
        self._pause_s = _FIRST_PAUSE_S
        self._round()

    def close(self) -> None:
        """Stop calling; a connection that was handed over belongs to its owner."""
        self._is_begun = False
        for timer in ("round", "next"):
            self._waiting.timer((id(self), timer), None, self._round)
        for lookup in self._lookups.values():
            lookup.close()
        for attempt in self._attempts:
            attempt.close()
        self._lookups.clear()
        self._attempts.clear()
        self._queue.clear()

    def hang_up(self) -> None:
        """Stop calling, and close the connection that was handed over."""
        self.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # A round ------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Resolve the names where that is due, and connect to all targets."""
        if self._pause_s >= _LONGEST_PAUSE_S:
            self._places.clear()
        for target in self._targets:
            places = self._places.get(target) or literal(*target)
            if places:
                self._places[target] = places
            else:
                done = partial(self._looked_up, target)
                self._lookups[target] = Lookup(*target, self._waiting, done)
        for lookup in list(self._lookups.values()):
            lookup.begin()
        if not self._lookups:
            self._call_all()

    def _looked_up(self, target: Target, places: tuple[Place, ...]) -> None:
        del self._lookups[target]
        usable = places
        if target.host not in {"localhost", own_name()}:
            # Some hosts resolve their own name to 127.0.1.1, and publish that.
            usable = tuple(place for place in places if not place.is_loopback)
        self._places[target] = usable
        if not places:
            self.troubles[target] = "the name cannot be resolved on this host"
        elif not usable:
            self.troubles[target] = f"the name resolves to {places[0].address}, which is this host"
        if not self._lookups:
            self._call_all()

    def _call_all(self) -> None:
        self._queue = [
            (target, place) for target in self._targets for place in self._places.get(target, ())
        ]
        self._next()

    def _next(self) -> None:
        """Connect to the next address; end the round if none is left or under way."""
        if not self._is_begun:
            return
        now = time.monotonic()
        if self._queue:
            target, place = self._queue.pop(0)
            failed = partial(self._failed, target)
            self._attempts.append(_Attempt(place, self._wire, ready=self._ready, failed=failed))
            if self._queue:
                self._waiting.timer((id(self), "next"), now + _NEXT_S, self._next)
        elif not self._attempts:
            at = now + self._pause_s * (0.5 + os.urandom(1)[0] / 512)
            self._pause_s = min(self._pause_s * _GROWTH, _LONGEST_PAUSE_S)
            self._waiting.timer((id(self), "round"), at, self._round)

    def _ready(self, attempt: _Attempt, connection: Connection) -> None:
        self._attempts.remove(attempt)
        self.close()
        self.troubles.clear()
        self._connection = connection
        self._opened(connection)

    def _failed(self, target: Target, attempt: _Attempt, why: str) -> None:
        self._attempts.remove(attempt)
        self.troubles[target], self.outcomes[target] = why, attempt.outcome
        self._waiting.timer((id(self), "next"), time.monotonic(), self._next)
        if attempt.outcome == REFUSED:
            self._closed(target)


class _Attempt:
    """One call at PLACE: READY is called with the connection, or FAILED with a reason."""

    def __init__(
        self,
        place: Place,
        wire: Wire,
        *,
        ready: Callable[[_Attempt, Connection], None],
        failed: Callable[[_Attempt, str], None],
    ) -> None:
        self._wire, self._waiting = wire, wire.waiting
        self._ready, self._failed = ready, failed
        self._connection: Connection | None = None
        self.outcome = SILENT
        self._connect = TcpConnect(place, wire.waiting, self._connected, _CONNECT_S, wire.source)

    def _connected(self, link: Link | None, number: int) -> None:
        if link is None:
            self.outcome = REFUSED if number == errno.ECONNREFUSED else SILENT
            why = reason(OSError(number, os.strerror(number)))
            if number == errno.ETIMEDOUT:
                why = f"no answer within {_CONNECT_S:g} s (is a firewall in between?)"
            self._fail(why)
            return
        self.outcome = OTHER
        late = partial(self._fail, "a program other than fleetrun listens there")
        self._waiting.timer((id(self), "deadline"), time.monotonic() + _INTRODUCTION_S, late)
        self._connection = Connection(
            link, self._wire, is_caller=True, ready=self._introduced, failed=self._refused
        )

    def _introduced(self, connection: Connection) -> None:
        self._connection = None
        self.close()
        self._ready(self, connection)

    def _refused(self, _: Connection, why: str) -> None:
        self._fail(f"the program that listens there {why}" if why == HUNG_UP else why)

    def _fail(self, why: str) -> None:
        self.close()
        self._failed(self, why)

    def close(self) -> None:
        """Give up; no callback follows."""
        self._waiting.timer((id(self), "deadline"), None, self.close)
        self._connect.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
