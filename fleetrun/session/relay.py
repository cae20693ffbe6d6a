"""Loop registrations that can be moved, as a session outlives the observer that lends it a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.run.loop import READABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fleetrun.run.loop import Waiting


class Relay:
    """A `Waiting` whose descriptors and alarms can be moved to another one."""

    def __init__(self) -> None:
        self._to: Waiting | None = None
        self._fds: dict[int, tuple[Callable[[], None], int]] = {}
        self._alarms: dict[Hashable, tuple[float, Callable[[], None]]] = {}

    def move(self, to: Waiting) -> None:
        """Register everything with TO, and no longer where it was."""
        before, self._to = self._to, to
        for fd, (callback, mask) in self._fds.items():
            if before is not None:
                before.unwatch(fd)
            to.watch(fd, callback, mask)
        for key, (at, _) in self._alarms.items():
            if before is not None:
                before.alarm(key, None, lambda: None)
            to.alarm(key, at, lambda key=key: self._ring(key))  # type: ignore[misc]

    def watch(self, fd: int, callback: Callable[[], None], mask: int = READABLE) -> None:
        """Call CALLBACK whenever FD is ready."""
        self._fds[fd] = (callback, mask)
        if self._to is not None:
            self._to.watch(fd, callback, mask)

    def unwatch(self, fd: int) -> None:
        """Stop calling for FD, if it was watched."""
        if self._fds.pop(fd, None) is not None and self._to is not None:
            self._to.unwatch(fd)

    def alarm(self, key: Hashable, at: float | None, callback: Callable[[], None]) -> None:
        """Call CALLBACK once at the moment AT; None takes KEY's alarm away."""
        if at is None:
            self._alarms.pop(key, None)
        else:
            self._alarms[key] = (at, callback)
        if self._to is not None:
            self._to.alarm(key, at, lambda: self._ring(key))

    def _ring(self, key: Hashable) -> None:
        _, callback = self._alarms.pop(key, (0.0, None))
        if callback is not None:
            callback()
