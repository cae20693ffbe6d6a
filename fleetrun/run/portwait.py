"""Waits until endpoints listen, by repeated non-blocking connection attempts."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fleetrun.model import Endpoint
    from fleetrun.run.loop import Waiting

_PACE_S = 0.05
# After this, try less often: a slow disk, or a host that is started by hand.
_SLOWER_AFTER_S = 10.0
_SLOW_PACE_S = 0.5
# A firewall may drop packets; the kernel alone would retry for two minutes.
_UNANSWERED_S = 2.0

Group = tuple["Endpoint", ...]


class PortWait:
    """Waits until one endpoint of each of GROUPS listens, or is gone; then calls DONE once.

    A listening process sees a connection that is closed at once.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        waiting: Waiting,
        is_gone: Callable[[Endpoint], bool],
        done: Callable[[], None],
    ) -> None:
        self._groups = list(groups)
        self._waiting = waiting
        self._is_gone = is_gone
        self._done = done
        self._began = time.monotonic()
        self._calls: dict[Endpoint, _Call] = {}

    @property
    def silent(self) -> tuple[Group, ...]:
        """The groups of which no endpoint listens yet."""
        return tuple(self._groups)

    def look(self) -> None:
        """Try all endpoints that do not listen yet; try again later if any are left."""
        self._groups = [group for group in self._groups if not self._is_settled(group)]
        if not self._groups:
            self.stop()
            self._done()
            return
        now = time.monotonic()
        pace = _PACE_S if now - self._began < _SLOWER_AFTER_S else _SLOW_PACE_S
        self._waiting.timer("listening", now + pace, self.look)

    def stop(self) -> None:
        """Stop waiting."""
        self._waiting.timer("listening", None, self.look)
        for call in self._calls.values():
            call.close()
        self._calls.clear()

    def _is_settled(self, group: Group) -> bool:
        # A process that has ended, such as a server that was not needed, will never listen.
        if any(map(self._is_gone, group)):
            return True
        answers = [self._listens(endpoint) for endpoint in group]
        return any(answers)

    def _listens(self, endpoint: Endpoint) -> bool:
        call = self._calls.pop(endpoint, None)
        if call is None:
            try:
                call = _Call(endpoint)
            except OSError:
                # Connection refused, no route, or no such name yet.
                return False
        if call.is_answered():
            call.close()
            return True
        if call.is_refused() or time.monotonic() - call.began > _UNANSWERED_S:
            call.close()
        else:
            self._calls[endpoint] = call
        return False


class _Call:
    """One attempt to connect."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.began = time.monotonic()
        self._socket = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(0)
            self._socket.connect_ex((endpoint.host, endpoint.port))
        except OSError:
            self.close()
            raise

    def _events(self) -> int:
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLOUT)
        return sum(event for _, event in poll.poll(0))

    def is_answered(self) -> bool:
        if self._events() != select.POLLOUT:
            return False
        try:
            # A socket whose own port is the one it connects to is connected to itself.
            return bool(self._socket.getpeername() != self._socket.getsockname())
        except OSError:
            return False

    def is_refused(self) -> bool:
        return self._events() != 0

    def close(self) -> None:
        self._socket.close()
