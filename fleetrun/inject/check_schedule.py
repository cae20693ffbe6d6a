"""Decides after which updates to check: often at first, then rarely."""

from __future__ import annotations

import math

NEVER = -1
# With a number N: the updates that are always checked. From the third on, everything that a reducer
# keeps between backwards (the order of buckets, their memory) is in use.
_ALWAYS = (1, 3)
# With `auto`: after updates 1, 2, 4, ... and then every so many.
_EVERY = 1024


def next_due(every: int | str, number: int) -> float:
    """Return the first update from NUMBER on after which there is a check; updates count from 1.

    EVERY is the setting `check_ranks`.

    >>> sorted({next_due("auto", update) for update in range(1, 3000)})
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072]
    >>> sorted({next_due(5, update) for update in range(1, 11)})
    [1, 3, 5, 10]
    """
    if every == NEVER:
        return math.inf
    if not isinstance(every, int):
        early = 1 << (number - 1).bit_length()
        return min(early, -(-number // _EVERY) * _EVERY)
    always = next((update for update in _ALWAYS if update >= number), math.inf)
    return min(always, -(-number // every) * every) if every else always


def is_due(every: int | str, number: int) -> bool:
    """Whether there is a check after the update NUMBER; see `next_due`."""
    return next_due(every, number) == number
