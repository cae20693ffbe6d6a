"""Decides after which updates to check: often at first, then rarely."""

from __future__ import annotations

NEVER = -1
# With a number N: the updates that are always checked. From the third on, everything that a reducer
# keeps between backwards (the order of buckets, their memory) is in use.
_ALWAYS = (1, 3)
# With `auto`: after updates 1, 2, 4, ... and then every so many.
_EVERY = 1024


def is_due(every: int | str, number: int) -> bool:
    """Whether there is a check after the update NUMBER, from 1; EVERY is `check_ranks`.

    >>> [update for update in range(1, 3100) if is_due("auto", update)]
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072]
    >>> [update for update in range(1, 11) if is_due(5, update)]
    [1, 3, 5, 10]
    """
    if every == NEVER:
        return False
    if not isinstance(every, int):
        return not (number & number - 1 if number < _EVERY else number % _EVERY)
    return number in _ALWAYS or (every > 0 and not number % every)
