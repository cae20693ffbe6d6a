"""Conversion: nothing is lost, nothing is out of bounds, and what is neither is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.cli import options
from fleetrun.strategy import fields
from fleetrun.text import (
    format_duration,
    format_ranges,
    format_size,
    parse_bool,
    parse_duration,
    parse_number,
    parse_range,
    parse_size,
    visible,
)

ANY = st.integers() | st.floats() | st.text(max_size=8) | st.booleans() | st.none()


@given(ANY, st.integers(-9, 9), st.integers(10, 10**6))
def test_a_number_is_within_its_bounds_and_worth_what_was_written(
    value: object, minimum: int, maximum: int
) -> None:
    for is_whole in (True, False):
        converted = parse_number(value, is_whole=is_whole, minimum=minimum, maximum=maximum)
        if converted is not None:
            assert minimum <= converted <= maximum
            assert isinstance(value, int | float | str)
            assert converted == float(value)
            assert isinstance(converted, int if is_whole else float)


@pytest.mark.parametrize("text", ["1_0", "1_0.5", "\u0661"])
def test_what_only_python_reads_as_a_number_is_none(text: str) -> None:
    for is_whole in (True, False):
        assert parse_number(text, is_whole=is_whole, minimum=None, maximum=99) is None


@given(ANY)
def test_a_boolean_is_none_or_one_and_a_number_is_no_other(value: object) -> None:
    converted = parse_bool(value)
    if isinstance(value, bool):
        assert converted is value
    elif isinstance(value, int | float):
        assert converted is (None if value not in (0, 1) else value == 1)


@pytest.mark.parametrize("word", ["y", "T", "on", "1", "yes", "TRUE", "n", "F", "off", "0", "no"])
def test_options_and_strategies_take_the_same_words(word: str) -> None:
    option = options.find("quiet")
    field = fields.find("strategy", "amp")
    assert option.kind.read(word) is fields.convert(field, word)


@given(st.integers(0, 1 << 45))
def test_a_size_is_read_as_it_is_written(count: int) -> None:
    read = parse_size(format_size(count))
    assert read is not None
    assert abs(read - count) <= count / 100


@given(st.floats(0, 1e7))
def test_a_duration_is_read_as_it_is_written(seconds: float) -> None:
    read = parse_duration(format_duration(seconds))
    assert read is not None
    assert abs(read - seconds) <= max(1, seconds / 24)


@given(st.sets(st.integers(0, 99)))
def test_ranges_are_read_as_they_are_written(numbers: set[int]) -> None:
    parts = filter(None, format_ranges(numbers).split(", "))
    assert [number for part in parts for number in parse_range(part) or ()] == sorted(numbers)


@pytest.mark.parametrize(
    "text", ["", "s", "1 x", "-1s", "1m soon", "\u0662s", "nan", "1..5s", "1_0", "1_0s"]
)
def test_what_is_no_duration_is_none(text: str) -> None:
    assert parse_duration(text) is None


@given(st.text())
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    assert visible(text).isprintable()
