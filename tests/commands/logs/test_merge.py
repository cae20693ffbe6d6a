"""Merging: no line is lost or split, and the order is that of the recorded times."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.commands.logs import merge


class Text:
    """A log in memory; its first bytes may be gone."""

    def __init__(self, text: bytes, begin: int = 0) -> None:
        self.text = text
        self.begin = begin

    def read(self, offset: int, length: int) -> bytes:
        """Return at most LENGTH bytes, and now and then fewer than requested."""
        assert offset >= self.begin
        return self.text[offset : offset + min(length, 5)]


def stream(text: bytes, *, prefix: bytes = b"", grep: bytes = b"") -> merge.Stream:
    pattern = re.compile(grep) if grep else None
    return merge.Stream(Text(text), at=0, prefix=prefix, pattern=pattern)


def test_lines_stand_in_the_order_in_which_they_were_noted() -> None:
    streams = [stream(b"a1\na2\n", prefix=b"A "), stream(b"b1\nb2\n", prefix=b"B ")]
    notes = [([10, 30], [3, 6]), ([20, 40], [3, 6])]
    assert b"".join(merge.history(streams, notes)) == b"A a1\nB b1\nA a2\nB b2\n"


def test_a_line_comes_when_it_is_whole() -> None:
    streams = [stream(b"begin end\n", prefix=b"A "), stream(b"b1\n", prefix=b"B ")]
    notes = [([10, 30], [6, 10]), ([20], [3])]
    assert b"".join(merge.history(streams, notes)) == b"B b1\nA begin end\n"


def test_the_rest_of_a_log_is_a_line_even_without_an_end() -> None:
    log = stream(b"a1\nhalf", prefix=b"A ")
    assert list(log.lines(7)) == [b"A a1\n"]
    assert log.rest(7) == b"A half\n"
    assert log.rest(7) == b""


def test_what_a_bar_wrote_over_is_left_out_beside_other_ranks() -> None:
    bar = b"1%\r50%\r100%\ndone\r\n"
    assert b"".join(stream(bar, prefix=b"A ").lines(len(bar))) == b"A 100%\nA done\r\n"
    assert b"".join(stream(bar).lines(len(bar))) == bar


def test_only_lines_with_a_match_are_shown() -> None:
    text = b"loss 1\nnan\nloss 2\n"
    assert b"".join(stream(text, prefix=b"A ", grep=b"^loss").lines(18)) == b"A loss 1\nA loss 2\n"
    assert list(stream(text, grep=b"inf").lines(18)) == []


def test_what_is_gone_from_the_beginning_is_skipped() -> None:
    stream = merge.Stream(Text(b"gone\nhere\n", begin=5), pattern=None)
    assert b"".join(stream.lines(10)) == b"here\n"


LINES = st.lists(st.binary(max_size=12).map(lambda text: re.sub(rb"[\r\n]", b"", text)), max_size=8)


@given(st.data())
def test_each_log_comes_out_whole_and_in_order(data: st.DataObject) -> None:
    logs = [b"".join(line + b"\n" for line in data.draw(LINES)) for _ in range(3)]
    notes = []
    for text in logs:
        count = data.draw(st.integers(0, 6))
        at = sorted(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
        places = st.lists(st.integers(0, len(text)), min_size=count, max_size=count)
        # The last note has all.
        notes.append(([*at, 10], [*sorted(data.draw(places)), len(text)]))
    streams = [stream(text, prefix=b"%d " % rank) for rank, text in enumerate(logs)]
    shown = b"".join(merge.history(streams, notes)).split(b"\n")[:-1]
    for rank, text in enumerate(logs):
        own = [line[2:] for line in shown if line.startswith(b"%d " % rank)]
        assert own == text.split(b"\n")[:-1]
    assert sum(text.count(b"\n") for text in logs) == len(shown)
