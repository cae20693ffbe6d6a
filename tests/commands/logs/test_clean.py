"""The output of ranks is shown without terminal control sequences, however it is split."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.commands.logs.clean import Cleaner, cleaned

TEXTS = st.lists(
    st.sampled_from(
        [
            *("loss 3", "\n", "\r", "\t", "é", "训练", "[31m", "]0;x", "m", "\\"),
            *(
                "\x1b",
                "\x1b[1;31m",
                "\x1b[",
                "\x1b]0;title",
                "\x07",
                "\x1b\\",
                "\x1bP",
                "\x9b",
                "\x08",
            ),
        ]
    ),
    max_size=12,
).map("".join)


@given(TEXTS, st.data())
def test_pieces_are_cleaned_like_the_whole(text: str, data: st.DataObject) -> None:
    whole = text.encode()
    cleaner, shown, at = Cleaner(), b"", 0
    while at < len(whole):
        size = data.draw(st.integers(1, len(whole) - at))
        shown += cleaner.feed(whole[at : at + size])
        at += size
    shown += cleaner.feed(b"", is_last=True)
    assert shown == cleaned(whole)


@given(TEXTS)
def test_nothing_is_left_that_acts_and_no_line_is_lost(text: str) -> None:
    shown = cleaned(text.encode()).decode()
    assert not re.search("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f]", shown)
    assert shown.count("\n") == text.count("\n")
    if not re.search("[\x00-\x08\x1b\x7f-\x9f]", text):
        assert shown == text
