"""Text that any terminal can show, and its width."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.plan.visible import columns, elided, visible


@given(st.text())
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    assert visible(text).isprintable()


@given(st.text(), st.integers(min_value=3, max_value=40))
def test_what_is_shortened_fits_and_keeps_both_ends(text: str, room: int) -> None:
    short = elided(text, room)
    assert columns(short) <= room
    if short != text:
        begin, _, end = short.partition("...")
        assert text.startswith(begin) or "..." in begin
        assert text.endswith(end) or "..." in end
