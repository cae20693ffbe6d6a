"""The connections of the launchers that call the coordinator, by number."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from fleetrun.run.loop import nothing
from fleetrun.session import exchange, messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.run.loop import Waiting
    from fleetrun.session.connection import Connection
    from fleetrun.session.messages import FromCoordinator, FromMember

# A launcher joins as soon as it is connected; on a bad network that takes seconds.
_JOIN_S = 10.0
# The most connections that have not joined yet: 512 launchers may connect at once.
_MOST_PENDING = 1024


class Callers:
    """Numbers the connections of callers, and closes those that do not join within JOIN_S.

    SAID is called with what a caller says, LOST with the number of one that is gone.
    """

    def __init__(
        self,
        waiting: Waiting,
        *,
        said: Callable[[int, Connection, FromMember | exchange.FromMember], None],
        lost: Callable[[int], None],
        join_s: float = _JOIN_S,
        most_pending: int = _MOST_PENDING,
    ) -> None:
        self._waiting = waiting
        self._said = said
        self._lost = lost
        self._join_s = join_s
        self._most_pending = most_pending
        # 0 is the coordinator's own launcher, which does not call.
        self._last = 0
        self._open: dict[int, Connection] = {}
        # The deadlines of connections that have not joined yet, in the order of arrival.
        self._pending: dict[int, float] = {}

    def take(self, caller: Connection) -> None:
        """Take an authenticated connection."""
        if len(self._pending) >= self._most_pending:
            self._close(self._least_wanted())
        self._last += 1
        number = self._last
        self._open[number] = caller
        caller.heard = partial(self._heard, number)
        caller.lost = partial(self._gone, number)
        self._pending[number] = time.monotonic() + self._join_s
        if len(self._pending) == 1:
            self._expire()

    def send(self, number: int, message: FromCoordinator | exchange.FromCoordinator) -> None:
        """Send MESSAGE to caller NUMBER, if it is still there."""
        caller = self._open.get(number)
        if caller is not None:
            caller.send(message)

    def finish(self, number: int) -> None:
        """Close the connection of caller NUMBER once all is sent."""
        self._pending.pop(number, None)
        caller = self._open.get(number)
        if caller is not None:
            caller.finish()

    def finish_all(self) -> None:
        """Close all connections once all is sent; nothing that they say counts any more."""
        self._waiting.timer((id(self), "join"), None, nothing)
        for caller in self._open.values():
            caller.finish()
        self._open.clear()
        self._pending.clear()

    def close(self) -> None:
        """Close all connections at once."""
        self._waiting.timer((id(self), "join"), None, nothing)
        for caller in self._open.values():
            caller.close()
        self._open.clear()
        self._pending.clear()

    def _heard(self, number: int, message: tuple[object, ...]) -> None:
        caller = self._open.get(number)
        if caller is None:
            return
        if not isinstance(message, (*messages.FROM_MEMBER, *exchange.FROM_MEMBER)):
            self._close(number)
            return
        if isinstance(message, messages.Join | messages.LauncherKilled):
            self._pending.pop(number, None)
        self._said(number, caller, message)

    def _gone(self, number: int, _why: str) -> None:
        self._pending.pop(number, None)
        if self._open.pop(number, None) is not None:
            self._lost(number)

    def _close(self, number: int) -> None:
        caller = self._open.get(number)
        if caller is not None:
            caller.close()
        self._gone(number, "")

    def _least_wanted(self) -> int:
        """Return the oldest of the address with most, so that a flood displaces only itself."""
        counts = Counter(self._open[number].address for number in self._pending)
        most, _ = counts.most_common(1)[0]
        return next(number for number in self._pending if self._open[number].address == most)

    def _expire(self) -> None:
        """Close connections that have not joined in time, and set the timer for the next."""
        now = time.monotonic()
        for number, until in list(self._pending.items()):
            if until > now:
                self._waiting.timer((id(self), "join"), until, self._expire)
                return
            self._close(number)
