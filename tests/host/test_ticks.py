"""The schedule of repeated measurements."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as some

from fleetrun.host.ticks import ticks

if TYPE_CHECKING:
    from collections.abc import Iterator


class ClockOffset:
    """A clock that goes on by some of LATE at each look, and sleeps at once."""

    def __init__(self, late: Iterator[float]) -> None:
        self._late = late
        self.now = 0.0

    def look(self) -> float:
        """Return the time, a little later than the last time."""
        self.now += next(self._late)
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance by SECONDS, which are not negative."""
        assert seconds >= 0
        self.now += seconds


def test_it_keeps_its_period() -> None:
    clock = ClockOffset(iter([0.0, 0.25, 0.5, 0.75]))
    seen = [clock.now for _ in islice(ticks(1.0, clock.look, clock.sleep), 4)]
    assert seen == [0.0, 1.0, 2.0, 3.0]


@given(some.lists(some.floats(0, 10), min_size=12, max_size=12), some.floats(0.01, 5))
def test_however_late_one_is_nobody_sleeps_backwards(late: list[float], period_s: float) -> None:
    clock = ClockOffset(iter(late))
    at = [clock.now for _ in islice(ticks(period_s, clock.look, clock.sleep), 6)]
    assert at == sorted(at)
