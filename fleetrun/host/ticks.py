"""The times of repeated measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


def ticks(
    period_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Yield at once and then every PERIOD_S seconds; missed times are not made up for."""
    due = clock()
    while True:
        yield
        # Read once: a second reading could be later than DUE, and a negative sleep is an error.
        now = clock()
        due = max(due + period_s, now)
        sleep(due - now)
