"""A fake of the event loop, whose timers elapse when a test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


class Timers:
    """Timers that are set; nobody here waits for a descriptor."""

    def __init__(self) -> None:
        # The moment of each, and what is called then.
        self.set: dict[Hashable, tuple[float, Callable[[], None]]] = {}

    def watch(self, fd: int, callback: Callable[[], None], mask: int = 1) -> None:
        """Refuse."""
        raise AssertionError(fd, callback, mask)

    def unwatch(self, fd: int) -> None:
        """Refuse, too."""
        raise AssertionError(fd)

    def timer(self, key: Hashable, at: float | None, callback: Callable[[], None]) -> None:
        """Set the timer KEY, or take it away."""
        self.set.pop(key, None)
        if at is not None:
            self.set[key] = (at, callback)

    def elapse(self, key: Hashable) -> bool:
        """Let the timer KEY elapse; return whether it was set."""
        if key not in self.set:
            return False
        _, callback = self.set.pop(key)
        callback()
        return True
