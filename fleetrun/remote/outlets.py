"""What the head shows: never waits for its reader, and lets the hosts wait instead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fleetrun.run.loop import WRITABLE
from fleetrun.sinks.outlet import Outlet

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.run.loop import Loop

# More than this of one stream is not kept: its writer is not read until there is room.
_MOST = 1 << 20
# How long the last lines wait for a reader that takes nothing.
_TIMEOUT_S = 2.0


class Outlets:
    """Standard output and error, with what has no room there yet."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._outlets = {fd: Outlet(fd) for fd in (1, 2)}
        self._rest = {1: b"", 2: b""}
        self._paused: dict[int, dict[int, Callable[[], None]]] = {1: {}, 2: {}}

    def put(self, fd: int, data: bytes, source: int, resume: Callable[[], None]) -> None:
        """Write DATA to FD; with too much waiting, SOURCE is not watched until RESUME may be."""
        self._rest[fd] += data
        self._pump(fd)
        if len(self._rest[fd]) > _MOST and source >= 0:
            self._loop.unwatch(source)
            self._paused[fd][source] = resume

    def _pump(self, fd: int) -> None:
        outlet = self._outlets[fd]
        while self._rest[fd] and not outlet.is_closed:
            try:
                taken = outlet.write(self._rest[fd])
            except OSError:
                # A full disk: there is nowhere left to say so.
                taken = len(self._rest[fd])
            self._rest[fd] = self._rest[fd][taken:]
            if not taken:
                break
        if outlet.is_closed:
            self._rest[fd] = b""
        if self._rest[fd] and outlet.can_wait:
            self._loop.watch(outlet.fd, lambda: self._pump(fd), WRITABLE)
        elif outlet.can_wait:
            self._loop.unwatch(outlet.fd)
        if len(self._rest[fd]) <= _MOST:
            paused, self._paused[fd] = self._paused[fd], {}
            for source, resume in paused.items():
                self._loop.watch(source, resume)

    def drain(self) -> None:
        """Wait a moment for readers to take the rest."""
        until = time.monotonic() + _TIMEOUT_S
        self._loop.timer(self, until, lambda: None)
        while any(self._rest.values()) and time.monotonic() < until:
            self._loop.turn()
