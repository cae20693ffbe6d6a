"""Records the gradients of a backward as they arrive, without a Python call for each.

Paddle calls a hook of each parameter whose gradient was accumulated. The hook here is a list's
`append`, which costs a fifth of a Python function. Only a gradient that is likely to be the last
of its bucket calls back, and the reducer reads the list then.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Callable


class Arrivals:
    """The gradients of one model, by the ids of their parameters, in the order of a backward.

    ON_END is called after each gradient of a parameter passed to `end_at`.
    """

    def __init__(self, on_end: Callable[..., None]) -> None:
        self._on_end = on_end
        # The hooks hold it, and live as long as the parameters.
        self.keys: list[int] = []
        # Paddle cannot remove such a hook.
        self._watched: set[int] = set()
        self._ends: set[int] = set()

    def watch(self, parameter: Any) -> bool:
        """Record the gradients of PARAMETER from now on; return False if they already are."""
        key = id(parameter)
        if key in self._watched:
            return False
        self._watched.add(key)
        tensors.on_gradient(parameter, functools.partial(self.keys.append, key))
        return True

    def end_at(self, parameter: Any) -> None:
        """Call `on_end` after each gradient of PARAMETER, which is watched already."""
        if id(parameter) not in self._ends:
            self._ends.add(id(parameter))
            tensors.on_gradient(parameter, self._on_end)

    def take(self) -> list[int]:
        """Return the gradients that have arrived since the last call."""
        keys = self.keys[:]
        self.keys.clear()
        return keys

    def clear(self) -> None:
        """Forget all gradients."""
        self.keys.clear()
