"""The event loop: descriptors that become ready, and timers."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Hashable
from typing import Protocol

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT


class Waiting(Protocol):
    """The part of the event loop that registers callbacks."""

    def watch(self, fd: int, callback: Callable[[], None], mask: int = READABLE) -> None:
        """Call CALLBACK whenever FD is ready."""

    def unwatch(self, fd: int) -> None:
        """Stop calling for FD, if it was watched."""

    def timer(self, key: Hashable, at: float | None, callback: Callable[[], None]) -> None:
        """Call CALLBACK once at the moment AT; None takes KEY's timer away."""


# The longest wait of one turn; a day is as good as forever.
_LONGEST_S = 86_400.0


class Loop:
    """The epoll behind `Waiting`."""

    def __init__(self) -> None:
        # Not `selectors`: epoll lists descriptors in the order they became ready, so the first
        # process to die comes first; and `selectors` takes 7 ms to import.
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._timers: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        # Those of this turn that are still watched: a closed one's number may be another's by now.
        self.ready: dict[int, None] = {}

    def watch(self, fd: int, callback: Callable[[], None], mask: int = READABLE) -> None:
        """Call CALLBACK whenever FD is ready; raise PermissionError for a regular file."""
        self.unwatch(fd)
        self._epoll.register(fd, mask)
        self._callbacks[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Stop calling for FD, if it was watched."""
        self.ready.pop(fd, None)
        # A killed child may be waited for when the loop of its call is closed.
        if self._callbacks.pop(fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    def timer(self, key: Hashable, at: float | None, callback: Callable[[], None]) -> None:
        """Call CALLBACK once at the moment AT; None takes KEY's timer away."""
        if at is None:
            self._timers.pop(key, None)
        else:
            self._timers[key] = (at, callback)

    def turn(self) -> None:
        """Wait until a callback is due, and call all that are."""
        now = time.monotonic()
        # The kernel counts milliseconds in an int.
        timeout = min([_LONGEST_S, *(at - now for at, _ in self._timers.values())])
        self.ready = dict.fromkeys([fd for fd, _ in self._epoll.poll(max(0.0, timeout))])
        # A timer that elapses while callbacks run waits for one more look at the descriptors: a
        # rank that ended before its grace was over is not killed, however long we took.
        if not self.ready:
            now = time.monotonic()
        for fd in tuple(self.ready):
            # An earlier callback of this turn may have removed it.
            if fd in self.ready:
                self._callbacks[fd]()
        for key, (at, callback) in list(self._timers.items()):
            if at <= now and self._timers.get(key) == (at, callback):
                del self._timers[key]
                callback()

    def close(self) -> None:
        """Close the epoll descriptor."""
        self._epoll.close()


class LoopShare:
    """The callbacks of one observer, each called through SHIELD, which handles exceptions.

    They can be moved to another loop or share; while TO is None they wait for that.
    """

    def __init__(
        self,
        to: Waiting | None,
        shield: Callable[[Callable[[], None]], None] = lambda callback: callback(),
    ) -> None:
        self._to, self._shield = to, shield
        self._fds: dict[int, tuple[Callable[[], None], int]] = {}
        self._timers: dict[Hashable, tuple[float, Callable[[], None]]] = {}

    def watch(self, fd: int, callback: Callable[[], None], mask: int = READABLE) -> None:
        """Call CALLBACK whenever FD is ready."""
        self._fds[fd] = (callback, mask)
        if self._to is not None:
            self._to.watch(fd, lambda: self._shield(callback), mask)

    def unwatch(self, fd: int) -> None:
        """Stop calling for FD, if it was watched."""
        if self._fds.pop(fd, None) is not None and self._to is not None:
            self._to.unwatch(fd)

    def timer(self, key: Hashable, at: float | None, callback: Callable[[], None]) -> None:
        """Call CALLBACK once at the moment AT; None takes KEY's timer away."""
        if at is None:
            self._timers.pop(key, None)
        else:
            self._timers[key] = (at, callback)
        if self._to is not None:
            self._to.timer((id(self), key), at, lambda: self._shield(self._timers.pop(key)[1]))

    def move(self, to: Waiting) -> None:
        """Register everything with TO, and no longer where it was."""
        fds, timers = self._fds, self._timers
        self.clear()
        self._to, self._fds, self._timers = to, {}, {}
        for fd, (callback, mask) in fds.items():
            self.watch(fd, callback, mask)
        for key, (at, callback) in timers.items():
            self.timer(key, at, callback)

    def clear(self) -> None:
        """Unregister everything."""
        if self._to is not None:
            for fd in self._fds:
                self._to.unwatch(fd)
            for key in self._timers:
                self._to.timer((id(self), key), None, nothing)


def poll(seconds: float | None, *fds: int, mask: int = READABLE) -> list[int]:
    """Return those of FDS that are ready as soon as any is, or none after SECONDS (None: never)."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, mask)
    return [fd for fd, _ in poller.poll(None if seconds is None else max(0.0, seconds) * 1000)]


def nothing() -> None:
    """Do nothing: for a timer that only wakes the loop, or is cleared."""
