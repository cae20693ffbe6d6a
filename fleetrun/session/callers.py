"""The connections of calling launchers: those that must still prove themselves, and the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from fleetrun.run.loop import Waiting
from fleetrun.session import exchange, messages
from fleetrun.session.connection import Connection
from fleetrun.session.messages import FromCoordinator, FromMember

# A launcher joins as soon as it is connected; on a bad network that takes seconds.
_JOIN_S = 10.0
# The most connections that have not joined yet: 512 launchers may connect at once.
_MOST_PENDING = 1024


class PendingCallers:
    """At most MOST connections that have WITHIN_S seconds to prove themselves, oldest first."""

    def __init__(
        self,
        waiting: Waiting,
        most: int,
        within_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = waiting
        self._most = most
        self._within_s = within_s
        self._clock = clock
        self._deadlines: dict[Connection, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, caller: Connection) -> None:
        """Add CALLER; if there are too many, drop the oldest of the address with the most.

        So a flood displaces only itself.
        """
        if len(self._deadlines) >= self._most:
            counts = Counter(caller_.address for caller_ in self._deadlines)
            most, _ = counts.most_common(1)[0]
            oldest = next(caller_ for caller_ in self._deadlines if caller_.address == most)
            self._drop(oldest, "was dropped in favour of newer callers")
        self._deadlines[caller] = self._clock() + self._within_s
        if len(self._deadlines) == 1:
            self._expire()

    def discard(self, caller: Connection) -> None:
        """Remove CALLER, which has proved itself or is gone."""
        self._deadlines.pop(caller, None)

    def drop_oldest(self, why: str) -> None:
        """Close the oldest connection."""
        self._drop(next(iter(self._deadlines)), why)

    def close(self) -> None:
        """Close all connections; no callback follows."""
        self._waiting.timer((id(self), "deadline"), None, self._expire)
        for caller in self._deadlines:
            caller.close()
        self._deadlines.clear()

    def _drop(self, caller: Connection, why: str) -> None:
        self.discard(caller)
        caller.lose(why)

    def _expire(self) -> None:
        """Drop connections whose time is up, and set the timer for the next."""
        now = self._clock()
        for caller, until in list(self._deadlines.items()):
            if until > now:
                self._waiting.timer((id(self), "deadline"), until, self._expire)
                return
            self._drop(caller, "sent no valid greeting in time")


class Callers:
    """Numbers the connections of callers, and closes those that do not join within JOIN_S.

    RECEIVED is called with each message of a caller, LOST with the number of one that is gone.
    """

    def __init__(
        self,
        waiting: Waiting,
        *,
        received: Callable[[int, Connection, FromMember | exchange.FromMember], None],
        lost: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
        join_s: float = _JOIN_S,
        most_pending: int = _MOST_PENDING,
    ) -> None:
        self._pass_on = received
        self._lost = lost
        # 0 is the coordinator's own launcher, which does not call.
        self._last = 0
        self._open: dict[int, Connection] = {}
        # Connections that have not joined yet.
        self._pending = PendingCallers(waiting, most_pending, join_s, clock)

    def take(self, caller: Connection) -> None:
        """Take an authenticated connection."""
        self._last += 1
        number = self._last
        self._open[number] = caller
        caller.heard = partial(self._heard, number)
        caller.lost = partial(self._gone, number)
        self._pending.add(caller)

    def send(self, number: int, message: FromCoordinator | exchange.FromCoordinator) -> None:
        """Send MESSAGE to caller NUMBER, if it is still there."""
        caller = self._open.get(number)
        if caller is not None:
            caller.send(message)

    def finish(self, number: int) -> None:
        """Close the connection of caller NUMBER once everything is sent."""
        caller = self._open.get(number)
        if caller is not None:
            self._pending.discard(caller)
            caller.finish()

    def finish_all(self) -> None:
        """Close all connections once everything is sent; ignore further input."""
        self._pending.close()
        for caller in self._open.values():
            caller.finish()
        self._open.clear()

    def close(self) -> None:
        """Close all connections at once."""
        self._pending.close()
        for caller in self._open.values():
            caller.close()
        self._open.clear()

    def _heard(self, number: int, message: tuple[object, ...]) -> None:
        caller = self._open.get(number)
        if caller is None:
            return
        if not isinstance(message, messages.FromMember | exchange.FromMember):
            caller.lose("sent a message that only a coordinator sends")
            return
        if isinstance(message, messages.Join | messages.LauncherKilled):
            self._pending.discard(caller)
        self._pass_on(number, caller, message)

    def _gone(self, number: int, _why: str) -> None:
        caller = self._open.pop(number, None)
        if caller is not None:
            self._pending.discard(caller)
            self._lost(number)
