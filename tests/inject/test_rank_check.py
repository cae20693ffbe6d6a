"""The checksums of parameters detect every change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.inject.checksums import of_array


@given(st.lists(st.floats(width=32), min_size=1), st.integers(0, 31), st.data())
def test_one_bit_changes_a_checksum(values: list[float], bit: int, data: st.DataObject) -> None:
    array = np.array(values, "float32")
    other = array.copy()
    place = data.draw(st.integers(0, len(values) - 1))
    other.view("uint32")[place] ^= np.uint32(1 << bit)
    assert of_array(array) == of_array(array.copy()) != of_array(other)
