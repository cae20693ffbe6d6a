"""Notes the gradients of a backward as they come, without a call in Python for each.

Paddle calls a hook of each parameter whose gradient is accumulated. What it calls here is a list's
`append`, which costs a fifth of a function of ours. That is told only once a gradient has come that
is likely to be the last of its bucket, and looks at the list then.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from ..paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Callable


class Arrivals:
    """The gradients of one model, by the ids of their parameters, in the order of a backward.

    ON_END is called after a gradient of a parameter that `end_at` has named. IS_TIMED: `times_s`
    says when each gradient came, by the steady clock, which takes a call for each.
    """

    def __init__(self, on_end: Callable[..., None], *, is_timed: bool) -> None:
        self._on_end = on_end
        self._is_timed = is_timed
        # The hooks hold these two, and live as long as the parameters.
        self.keys: list[int] = []
        self.times_s: dict[int, float] = {}
        # Paddle cannot remove such a hook.
        self._watched: set[int] = set()
        self._ends: set[int] = set()

    def watch(self, parameter: Any) -> bool:
        """Note the gradients of PARAMETER from now on; return whether that is new."""
        key = id(parameter)
        if key in self._watched:
            return False
        self._watched.add(key)
        note = functools.partial(self.keys.append, key)
        tensors.on_gradient(parameter, self._timed(key, note) if self._is_timed else note)
        return True

    def end_at(self, parameter: Any) -> None:
        """Call `on_end` after gradients of PARAMETER, which is watched, from now on."""
        if id(parameter) not in self._ends:
            self._ends.add(id(parameter))
            tensors.on_gradient(parameter, self._on_end)

    def take(self) -> list[int]:
        """Return the gradients that have come since the last time."""
        keys = self.keys[:]
        self.keys.clear()
        return keys

    def clear(self) -> None:
        """Forget all gradients."""
        self.keys.clear()
        self.times_s.clear()

    def _timed(self, key: int, note: Callable[[], None]) -> Callable[..., None]:
        times_s = self.times_s

        def timed(*_: Any) -> None:
            times_s[key] = time.perf_counter()
            note()

        return timed
