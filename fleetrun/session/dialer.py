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
    plain_address,
)
from fleetrun.session.connection import HUNG_UP, Connection, Wire, reason

# A firewall may drop packets; the next address is tried after this.
_NEXT_S = 0.25
# How long a connection and then the handshake may take. The kernel would repeat a lost SYN after
# 1, 3 and 7 s, which is late when a network has come back.
_CONNECT_S, _INTRODUCTION_S = 1.0, 5.0
# The pause between two rounds: hosts that start together find each other at once, and thousands
# that wait for one do not flood it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.02, 1.0, 1.3
# How a call failed: the TCP connection was refused, or nothing came back, or whatever accepted it
# did not prove to belong to this job.
REFUSED, SILENT, OTHER = "refused", "silent", "another program"
# Names are resolved again, as a host that is being started may change its address.
_LOOK_UP_AGAIN_S = 2.0


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
    """Calls TARGETS in turn until a launcher that knows KEY answers; OPENED gets the connection.

    A round tries every address of every target; after a pause comes the next, until `close`. CLOSED
    is called with each address and port where nothing listens, unless a launcher has refused us.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        wire: Wire,
        *,
        opened: Callable[[Connection], None],
        closed: Callable[[Target], None] | None = None,
    ) -> None:
        self._targets = tuple(targets)
        self._wire = wire
        self._waiting = wire.waiting
        self._opened = opened
        self._closed = closed
        self._connection: Connection | None = None
        self._is_begun = False
        self._pause_s = _FIRST_PAUSE_S
        self._places: dict[Target, tuple[Place, ...]] = {}
        self._looked_up_at = 0.0
        self._lookups: dict[Target, Lookup] = {}
        self._queue: list[tuple[Target, Place]] = []
        self._attempts: list[_Attempt] = []
        # The last failure of each target, as text and kind, and the targets that said why.
        self.troubles: dict[Target, str] = {}
        self.outcomes: dict[Target, str] = {}
        self._refused: set[Target] = set()

    @property
    def trouble(self) -> str:
        """Return why there is no connection yet, with address and port; empty if unknown.

        A launcher's refusal is kept: it says more than another address's silence.
        """
        return in_words(self.troubles)

    @property
    def is_calling(self) -> bool:
        """Whether an attempt is under way."""
        return bool(self._attempts or self._queue)

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
        """Resolve the names if that was long ago, and connect to all targets."""
        now = time.monotonic()
        is_known = all(self._places.get(target) for target in self._targets)
        if is_known and now < self._looked_up_at + _LOOK_UP_AGAIN_S:
            self._call_all()
            return
        self._looked_up_at = now
        self._places = {target: literal(*target) for target in self._targets}
        self._lookups = {
            target: Lookup(*target, self._waiting, partial(self._looked_up, target))
            for target, places in self._places.items()
            if not places
        }
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
        if self._queue:
            target, place = self._queue.pop(0)
            failed = partial(self._failed, target)
            attempt = _Attempt(place, self._wire, ready=self._ready, failed=failed)
            self._attempts.append(attempt)
            if self._queue and self._is_begun:
                self._waiting.timer((id(self), "next"), time.monotonic() + _NEXT_S, self._next)
        elif not self._attempts:
            # `random` takes 4 ms to import.
            pause_s = self._pause_s * (0.5 + os.urandom(1)[0] / 512)
            self._pause_s = min(self._pause_s * _GROWTH, _LONGEST_PAUSE_S)
            self._waiting.timer((id(self), "round"), time.monotonic() + pause_s, self._round)

    def _ready(self, attempt: _Attempt, connection: Connection) -> None:
        self._attempts.remove(attempt)
        self.close()
        self.troubles.clear()
        self._refused.clear()
        self._connection = connection
        self._opened(connection)

    def _failed(self, target: Target, attempt: _Attempt, why: str) -> None:
        self._attempts.remove(attempt)
        if attempt.is_refused:
            self._refused.add(target)
        if attempt.is_refused or target not in self._refused:
            # Keep the refusal of a coordinator that has stopped listening since.
            self.troubles[target] = why
            self.outcomes[target] = attempt.outcome
        self._waiting.timer((id(self), "next"), time.monotonic(), self._next)
        is_closed = attempt.outcome == REFUSED
        if is_closed and self._closed is not None and target not in self._refused:
            self._closed(attempt.target)


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
        self._wire = wire
        self._waiting = wire.waiting
        self._ready = ready
        self._failed = failed
        self._connection: Connection | None = None
        self.target = Target(plain_address(place.name), int(str(place.name[1])))
        # Whether the listener has said why it refuses us.
        self.is_refused = False
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
        until = time.monotonic() + _INTRODUCTION_S
        self._waiting.timer((id(self), "deadline"), until, self._late)
        self._connection = Connection(
            link, self._wire, is_caller=True, ready=self._introduced, failed=self._refused
        )

    def _introduced(self, connection: Connection) -> None:
        self._waiting.timer((id(self), "deadline"), None, self._late)
        self._connection = None
        self._ready(self, connection)

    def _refused(self, _: Connection, why: str) -> None:
        self.is_refused = why != HUNG_UP
        self._fail(why if self.is_refused else f"the program that listens there {why}")

    def _late(self) -> None:
        self._fail("a program other than fleetrun listens there")

    def _fail(self, why: str) -> None:
        self.close()
        self._failed(self, why)

    def close(self) -> None:
        """Give up; no callback follows."""
        self._waiting.timer((id(self), "deadline"), None, self._late)
        self._connect.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
