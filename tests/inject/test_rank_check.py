"""When the ranks are compared, and what their checksums see."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.inject.checksums import of_array
from fleetrun.inject.rank_check import is_due


@given(st.integers(1, 10**6))
def test_auto_compares_a_few_times_in_a_hundred_updates(first: int) -> None:
    compared = sum(is_due("auto", update) for update in range(first, first + 100))
    assert 3 <= compared <= 3 + 7


@given(st.integers(1, 10**6))
def test_auto_asks_ever_more_rarely_where_ranks_differ_by_rounding(update: int) -> None:
    assert is_due("auto", update, is_exact=False) == (update.bit_count() == 1)


@given(st.lists(st.floats(width=32), min_size=1), st.integers(0, 31), st.data())
def test_one_bit_changes_a_checksum(values: list[float], bit: int, data: st.DataObject) -> None:
    array = np.array(values, "float32")
    other = array.copy()
    place = data.draw(st.integers(0, len(values) - 1))
    other.view("uint32")[place] ^= np.uint32(1 << bit)
    assert of_array(array) == of_array(array.copy()) != of_array(other)
