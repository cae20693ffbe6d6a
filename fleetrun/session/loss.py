"""What the guard of a launcher that was killed tells the other hosts, in its place.

The kernel has told them that the connection has ended, but not why: a firewall may have reset it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.session.dialer import Dialer, Target
from fleetrun.session.listener import Listener
from fleetrun.session.messages import CoordinatorKilled, Join, LauncherKilled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fleetrun.run.loop import Waiting
    from fleetrun.session.authentication import Key
    from fleetrun.session.codec import Codec
    from fleetrun.session.connection import Connection

# So long the others have to call a coordinator that was killed: they do at once.
_CALLED_S = 1.0
_AGAIN_S = 0.005


class LossPlace(NamedTuple):
    """Where the others are told: at the coordinator's address, or where they call us (SERVES)."""

    serves: bool
    address: str
    port: int


class LossReport:
    """Tells the others that LAUNCHER was killed, and later that its ranks have ended.

    A coordinator that is lost listens no more: whoever calls its PLACE hears that from here.
    """

    def __init__(
        self,
        place: LossPlace,
        *,
        launcher: str,
        secret: str,
        key: Key,
        codec: Codec,
        waiting: Waiting,
        allowed: Collection[str] | None = None,
    ) -> None:
        self._place = place
        self._launcher = launcher
        self._secret = secret
        self._key = key
        self._codec = codec
        self._waiting = waiting
        self._allowed = allowed
        self._has_ranks = True
        self._until = time.monotonic() + _CALLED_S
        self._connection: Connection | None = None
        self._callers: list[Connection] = []
        self._dialer: Dialer | None = None
        self._listener: Listener | None = None
        if place.serves:
            self._listen()
        else:
            self._call()

    @property
    def is_done(self) -> bool:
        """Whether all is told that can be."""
        if self._place.serves:
            return time.monotonic() >= self._until
        return not self._has_ranks and self._connection is not None and not self._connection.is_open

    def ended(self) -> None:
        """Tell that no rank is left."""
        self._has_ranks = False
        if self._connection is not None:
            self._tell(self._connection)

    def close(self) -> None:
        """Tell nobody any more."""
        for one in (self._dialer, self._listener, self._connection, *self._callers):
            if one is not None:
                one.close()

    def _call(self) -> None:
        self._dialer = Dialer(
            [Target(self._place.address, self._place.port)],
            key=self._key,
            codec=self._codec,
            waiting=self._waiting,
            opened=self._answered,
        )
        self._dialer.begin()

    def _answered(self, connection: Connection) -> None:
        self._connection = connection
        connection.lost = self._lost
        self._tell(connection)

    def _lost(self, _: str) -> None:
        if self._has_ranks and self._dialer is not None:
            self._connection = None
            self._dialer.begin()

    def _tell(self, connection: Connection) -> None:
        connection.send(LauncherKilled(self._launcher, self._secret, self._has_ranks))
        if not self._has_ranks:
            connection.finish()

    def _listen(self) -> None:
        listener = Listener(
            [self._place.address],
            [self._place.port],
            key=self._key,
            codec=self._codec,
            opened=self._called,
            refused=_say_nothing,
            allowed=self._allowed,
        )
        if not listener.has_bound():
            # The kernel is still closing the launcher's files; or somebody has started it again.
            if time.monotonic() < self._until:
                at = time.monotonic() + _AGAIN_S
                self._waiting.alarm((id(self), "listen"), at, self._listen)
            return
        listener.open(self._waiting)
        self._listener = listener

    def _called(self, connection: Connection) -> None:
        self._callers.append(connection)
        connection.heard = _answer(connection)


def _answer(connection: Connection) -> Callable[[tuple[object, ...]], None]:
    """Return what tells a member at the other end of CONNECTION, when it joins again."""

    def heard(message: tuple[object, ...]) -> None:
        # Whoever has no place yet may wait for a coordinator that is started again.
        if isinstance(message, Join) and message.session:
            connection.send(CoordinatorKilled())
        connection.finish()

    return heard


def _say_nothing(_: str, __: str) -> None:
    """Refuse strangers in silence."""
