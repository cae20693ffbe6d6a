"""When what is measured again and again is measured next."""

from __future__ import annotations

import time

from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def ticks(
    period_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Yield now and each PERIOD_S; what was missed by being late is not made up for."""
    due = clock()
    while True:
        yield
        # Once: a second look at the clock may be later than DUE, and nobody sleeps backwards.
        now = clock()
        due = max(due + period_s, now)
        sleep(due - now)
