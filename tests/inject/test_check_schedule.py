"""When ranks are compared, and gradients checked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.inject.check_schedule import is_due, next_due


@given(st.integers(1, 10**6))
def test_auto_compares_once_in_a_thousand_updates_later(first: int) -> None:
    compared = sum(is_due("auto", update) for update in range(first, first + 1024))
    assert compared == 1 or first <= 1024


@given(st.sampled_from(["auto", 0, 1, 7, 1000]), st.integers(1, 10**6))
def test_no_update_between_a_number_and_the_next_due_is_due(every: int | str, number: int) -> None:
    due = next_due(every, number)
    assert due >= number
    assert not any(
        is_due(every, between) for between in range(number, min(int(min(due, 1e7)), number + 50))
    )
