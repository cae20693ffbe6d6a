"""Decides after which updates to check: often at first, then as rarely as the cost requires."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NEVER = -1
# With a number N: the updates that are always checked. From the third on, everything that a reducer
# keeps between backwards (the order of buckets, their memory) is in use.
_ALWAYS = (1, 3)
# With `auto`: after updates 1, 2, 4, ... and at intervals between these bounds.
_MOST_OFTEN, _LEAST_OFTEN = 32, 1024
# The share of the training time that regular checks of one kind may take; there are two kinds.
_SHARE = 0.002


def next_due(every: int | str, number: int, *, interval: int | None = _MOST_OFTEN) -> float:
    """Return the first update from NUMBER on after which there is a check; updates count from 1.

    EVERY is the setting `check_ranks`. INTERVAL, a power of 2, is that of `auto`; None: only after
    powers of 2.

    >>> sorted({next_due("auto", update) for update in range(1, 97)})
    [1, 2, 4, 8, 16, 32, 64, 96]
    >>> sorted({next_due(5, update) for update in range(1, 11)})
    [1, 3, 5, 10]
    """
    if every == NEVER:
        return math.inf
    early: float = 1 << (number - 1).bit_length()
    step = interval
    if isinstance(every, int):
        early = next((update for update in _ALWAYS if update >= number), math.inf)
        step = every
    return min(early, -(-number // step) * step) if step else early


def is_due(every: int | str, number: int, *, interval: int | None = _MOST_OFTEN) -> bool:
    """Whether there is a check after the update NUMBER; see `next_due`."""
    return next_due(every, number, interval=interval) == number


def interval_of(check_s: float, update_s: float) -> int:
    """Return the updates of UPDATE_S between checks of CHECK_S, a power of 2.

    >>> interval_of(0.001, 0.1), interval_of(0.01, 0.02), interval_of(1.0, 0.0)
    (32, 256, 1024)
    """
    interval = _MOST_OFTEN
    while interval < _LEAST_OFTEN and check_s > _SHARE * interval * update_s:
        interval *= 2
    return interval


class Pace:
    """How often one model or program is checked, by the cost of a check measured on all ranks.

    `check_s` and `update_s` are this rank's recent wall-clock times, 0 while unknown: a busy
    machine makes both longer. The first check takes longer than others and does not count.
    """

    def __init__(self) -> None:
        self.check_s = self.update_s = 0.0
        # See `is_due`.
        self.interval: int | None = _MOST_OFTEN
        # The time spent in the current check.
        self._spent_s = 0.0
        # When the last check ended, and after which update.
        self._last: tuple[float, int] | None = None

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time in this context as part of the check."""
        began_at = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - began_at

    def end(self, number: int) -> None:
        """End the check after the update NUMBER."""
        now = time.perf_counter()
        if self._last is not None and number > self._last[1]:
            update_s = (now - self._last[0] - self._spent_s) / (number - self._last[1])
            self.update_s = _smooth(self.update_s, update_s)
            self.check_s = _smooth(self.check_s, self._spent_s)
        self._spent_s = 0.0
        self._last = now, number

    def agree(self, check_s: float, update_s: float, *, doubles_updates: bool = False) -> None:
        """Choose the interval by CHECK_S and UPDATE_S, on which all ranks agree.

        DOUBLES_UPDATES: a checked update takes twice as long, besides the check.
        """
        if self.interval is not None:
            self.interval = interval_of(check_s + doubles_updates * update_s, update_s)


def _smooth(known: float, new: float) -> float:
    return (known + new) / 2 if known else new
