"""The event loop: descriptors that become ready, and alarms."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT


class Waiting(Protocol):
    """The part of the event loop with which callbacks are registered."""

    def watch(self, fd: int, callback: Callable[[], None], mask: int = READABLE) -> None:
        """Call CALLBACK whenever FD is ready."""

    def unwatch(self, fd: int) -> None:
        """Stop calling for FD, if it was watched."""

    def alarm(self, key: Hashable, at: float | None, callback: Callable[[], None]) -> None:
        """Call CALLBACK once at the moment AT; None takes KEY's alarm away."""


# One turn of the loop waits no longer; a day is as good as for ever.
_LONGEST_S = 86_400.0


class Loop:
    """The epoll behind `Waiting`."""

    def __init__(self) -> None:
        # Not `selectors`: epoll lists descriptors in the order in which they became ready, which
        # shows which process died first, and it takes 7 ms less to import.
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._alarms: dict[Hashable, tuple[float, Callable[[], None]]] = {}

    def watch(self, fd: int, callback: Callable[[], None], mask: int = READABLE) -> None:
        """Call CALLBACK whenever FD is ready; files that are always ready are an error."""
        self.unwatch(fd)
        self._epoll.register(fd, mask)
        self._callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Stop calling for FD, if it was watched."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def alarm(self, key: Hashable, at: float | None, callback: Callable[[], None]) -> None:
        """Call CALLBACK once at the moment AT; None takes KEY's alarm away."""
        if at is None:
            self._alarms.pop(key, None)
        else:
            self._alarms[key] = (at, callback)

    def turn(self) -> None:
        """Wait until something is due, and do it."""
        timeout = -1.0
        if self._alarms:
            timeout = max(0.0, min(at for at, _ in self._alarms.values()) - time.monotonic())
            # The kernel counts milliseconds in an int.
            timeout = min(timeout, _LONGEST_S)
        for fd, _ in self._epoll.poll(timeout):
            # An earlier callback of this turn may have taken it away.
            callback = self._callbacks.get(fd)
            if callback is not None:
                callback()
        now = time.monotonic()
        for key, (at, callback) in list(self._alarms.items()):
            if at <= now and self._alarms.get(key) == (at, callback):
                del self._alarms[key]
                callback()

    def close(self) -> None:
        """Give the descriptor back."""
        self._epoll.close()


class LoopShare:
    """The callbacks of one observer, all of which SHIELD calls; it handles their exceptions."""

    def __init__(self, loop: Loop, shield: Callable[[Callable[[], None]], None]) -> None:
        self._shield = shield
        self._loop = loop
        self._fds: set[int] = set()
        self._keys: set[Hashable] = set()

    def watch(self, fd: int, callback: Callable[[], None], mask: int = READABLE) -> None:
        """Call CALLBACK whenever FD is ready."""
        self._fds.add(fd)
        self._loop.watch(fd, lambda: self._shield(callback), mask)

    def unwatch(self, fd: int) -> None:
        """Stop calling for FD."""
        self._fds.discard(fd)
        self._loop.unwatch(fd)

    def alarm(self, key: Hashable, at: float | None, callback: Callable[[], None]) -> None:
        """Call CALLBACK once at the moment AT; None takes KEY's alarm away."""
        own = (id(self), key)
        self._keys.add(own)
        self._loop.alarm(own, at, lambda: self._shield(callback))

    def clear(self) -> None:
        """Unregister everything."""
        for fd in self._fds:
            self._loop.unwatch(fd)
        for key in self._keys:
            self._loop.alarm(key, None, nothing)


def nothing() -> None:
    """Do nothing: for an alarm that only wakes the loop, or is taken away."""
