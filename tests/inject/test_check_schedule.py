"""When ranks are compared, and gradients checked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.inject.check_schedule import Pace, interval_of, is_due

TIMES = st.floats(1e-6, 1e3)


@given(st.integers(1, 10**6))
def test_auto_compares_a_few_times_in_a_hundred_updates(first: int) -> None:
    compared = sum(is_due("auto", update) for update in range(first, first + 100))
    assert 3 <= compared <= 3 + 7


@given(st.integers(1, 10**6))
def test_auto_asks_ever_more_rarely_where_ranks_differ_by_rounding(update: int) -> None:
    assert is_due("auto", update, interval=None) == (update.bit_count() == 1)


@given(TIMES, TIMES)
def test_checks_of_one_kind_take_less_than_half_a_per_cent_of_the_updates_between(
    check_s: float, update_s: float
) -> None:
    interval = interval_of(check_s, update_s)
    assert 32 <= interval <= 1024
    assert interval.bit_count() == 1
    assert interval == 1024 or check_s < 0.005 * interval * update_s
    # The interval is no longer than needed for that.
    assert interval == 32 or check_s > 0.0009 * interval * update_s


@given(st.integers(1, 10**6), st.integers(5, 10).map(lambda power: 1 << power))
def test_a_longer_interval_leaves_checks_out_and_adds_none(update: int, interval: int) -> None:
    assert is_due("auto", update) or not is_due("auto", update, interval=interval)


def test_a_pace_knows_what_a_check_took_but_the_first_and_an_update_between() -> None:
    pace = Pace()
    with pace.measured():
        sum(range(10**5))
    pace.end(1)
    assert (pace.check_s, pace.update_s) == (0, 0)
    with pace.measured():
        pass
    pace.end(3)
    assert pace.check_s > 0
    assert pace.update_s > 0


@given(TIMES, TIMES)
def test_updates_that_a_check_doubles_are_checked_in_less_than_half_a_per_cent_of_the_time(
    check_s: float, update_s: float
) -> None:
    pace = Pace()
    pace.agree(check_s, update_s, doubles_updates=True)
    assert pace.interval in {512, 1024}
    assert pace.interval == 1024 or check_s + update_s <= 0.005 * pace.interval * update_s


def test_where_ranks_differ_by_rounding_no_time_brings_the_interval_back() -> None:
    pace = Pace()
    pace.interval = None
    pace.agree(0.001, 1.0)
    assert pace.interval is None
