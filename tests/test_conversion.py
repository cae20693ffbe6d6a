"""Conversion: nothing is lost, nothing is out of bounds, and what is neither is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun import conversion, options
from fleetrun.strategy import fields

ANY = st.integers() | st.floats() | st.text(max_size=8) | st.booleans() | st.none()


@given(ANY, st.integers(-9, 9), st.integers(10, 10**6))
def test_a_number_is_within_its_bounds_and_worth_what_was_written(
    value: object, minimum: int, maximum: int
) -> None:
    for is_whole in (True, False):
        found = conversion.number(value, is_whole=is_whole, minimum=minimum, maximum=maximum)
        if found is not None:
            assert minimum <= found <= maximum
            assert isinstance(value, int | float | str)
            assert found == float(value)
            assert isinstance(found, int if is_whole else float)


@given(ANY)
def test_a_boolean_is_none_or_one_and_a_number_is_no_other(value: object) -> None:
    found = conversion.boolean(value)
    if isinstance(value, bool):
        assert found is value
    elif isinstance(value, int | float):
        assert found is (None if value not in (0, 1) else value == 1)


@pytest.mark.parametrize("word", ["y", "T", "on", "1", "yes", "TRUE", "n", "F", "off", "0", "no"])
def test_options_and_strategies_take_the_same_words(word: str) -> None:
    option = options.find("quiet")
    field = fields.find("strategy", "amp")
    assert options.parse(option, word) is fields.convert(field, word)
