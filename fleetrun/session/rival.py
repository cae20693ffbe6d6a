"""Looks for a second coordinator of the same job, which exists if lists differ in their order.

Each host considers the first of its list the coordinator, so they would wait for each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from fleetrun.session.connection import Connection, Wire
from fleetrun.session.dialer import Dialer, Target
from fleetrun.session.messages import Join, Refused

# Hosts that start together connect earlier; then this many random targets are called at a time.
_FIRST_S, _AGAIN_S, _MOST = 1.0, 3.0, 16


class RivalSearch:
    """Calls the hosts that MISSING names at PORTS and sends them JOIN, until `close`.

    REPORT is called with the reason when one refuses that and ends its job.
    """

    def __init__(
        self,
        ports: Sequence[int],
        wire: Wire,
        *,
        missing: Callable[[], Sequence[str]],
        join: Callable[[], Join | None],
        report: Callable[[str], None],
    ) -> None:
        self._ports = ports
        self._wire = wire
        self._waiting = wire.waiting
        self._missing = missing
        self._join = join
        self._report = report
        self._dialer: Dialer | None = None
        self._call_later(_FIRST_S)

    def close(self) -> None:
        """Stop looking."""
        self._waiting.timer((id(self), "rival"), None, self._call)
        if self._dialer is not None:
            self._dialer.hang_up()

    def _call_later(self, seconds: float) -> None:
        self._waiting.timer((id(self), "rival"), time.monotonic() + seconds, self._call)

    def _call(self) -> None:
        self.close()
        targets = [Target(name, port) for name in self._missing() for port in self._ports]
        if not targets:
            return
        # In random order; `random` takes 4 ms to import.
        targets.sort(key=lambda _: os.urandom(4))
        self._dialer = Dialer(targets[:_MOST], self._wire, opened=self._opened)
        self._dialer.begin()
        self._call_later(_AGAIN_S)

    def _opened(self, connection: Connection) -> None:
        join = self._join()
        connection.heard = self._heard
        if join is not None:
            connection.send(join)

    def _heard(self, message: tuple[object, ...]) -> None:
        if isinstance(message, Refused) and message.ends_job:
            self.close()
            self._report(message.why)
