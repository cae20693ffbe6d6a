"""What the guard of a killed launcher tells the coordinator.

The coordinator only sees that the connection has ended, which a firewall may have caused. If the
killed launcher was the coordinator in etcd, the guard frees its place.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fleetrun.session.connection import Connection, Wire
from fleetrun.session.dialer import Dialer, Target
from fleetrun.session.messages import LauncherKilled

if TYPE_CHECKING:
    from fleetrun.session.jobstore import JobStore, StoreAnswer

# The pause before a coordinator that has hung up is called again.
_AGAIN_S = 0.5


class LossReport:
    """Reports to the coordinator at TARGET that LAUNCHER was killed, and when its ranks ended."""

    def __init__(self, target: Target, wire: Wire, *, launcher: str) -> None:
        self._launcher = launcher
        self._waiting = wire.waiting
        self._has_ranks = True
        # Whether the coordinator has hung up after the last report.
        self.is_done = False
        self._connection: Connection | None = None
        self._dialer = Dialer([target], wire, opened=self._opened)
        self._dialer.begin()

    def ended(self) -> None:
        """Report that no rank is left."""
        self._has_ranks = False
        if self._connection is not None:
            self._tell(self._connection)

    def close(self) -> None:
        """Stop reporting."""
        self._waiting.timer((id(self), "again"), None, self._dialer.begin)
        self._dialer.hang_up()

    def _opened(self, connection: Connection) -> None:
        self._connection = connection
        connection.lost = self._lost
        self._tell(connection)

    def _lost(self, _: str) -> None:
        self._connection = None
        self.is_done = not self._has_ranks
        if not self.is_done:
            again_at = time.monotonic() + _AGAIN_S
            self._waiting.timer((id(self), "again"), again_at, self._dialer.begin)

    def _tell(self, connection: Connection) -> None:
        connection.send(LauncherKilled(self._launcher, self._has_ranks))
        if not self._has_ranks:
            connection.finish()


class PlaceRelease:
    """Frees a coordinator's place in STORE, by REVISION and LEASE, when its ranks have ended.

    Until then the lease keeps others from starting; otherwise it would end by its timeout.
    """

    def __init__(self, store: JobStore, revision: int, lease: int) -> None:
        self._store = store
        self._values = revision, lease, False
        self.is_done = False

    def ended(self) -> None:
        """Free the place, as no rank is left."""
        self._store.ask(self._answered, "leave", *self._values)

    def _answered(self, _: StoreAnswer) -> None:
        self.is_done = True
