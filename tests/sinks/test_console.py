"""Simultaneous output of several ranks, as shown on the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.sinks.console import Feed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Rank:
    """A rank that writes, and the console that reads its log when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "workerlog.0"
        self.path.write_bytes(b"")
        self.feed = Feed(str(self.path), b"[0] ")
        self.shown = b""
        self.now = 0.0

    def write(self, text: bytes) -> None:
        """Write TEXT, and let the console look."""
        with self.path.open("ab") as file:
            file.write(text)
        self.look()

    def look(self, *, is_last: bool = False) -> None:
        """Let the console look until there is no more."""
        while piece := self.feed.take(is_last=is_last, now=self.now):
            self.shown += piece

    def wait(self, seconds: float = 1.0) -> None:
        """Let some time pass."""
        self.now += seconds
        self.look()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.feed.close()


def test_a_bar_shows_its_state_now_and_then_and_at_its_end(rank: Rank) -> None:
    # tqdm writes like this.
    for share in (b"\r 10%|#", b"\r 20%|##"):
        rank.write(share)
        rank.wait()
    assert rank.shown == b""
    rank.wait(10)
    assert rank.shown == b"[0]  20%|##\n"
    rank.write(b"\r 30%|###\r 40%|####\nnext\n")
    assert rank.shown == b"[0]  20%|##\n[0]  40%|####\n[0] next\n"


def test_a_piece_without_an_end_is_shown_after_a_while(rank: Rank) -> None:
    rank.write(b"name? ")
    assert rank.shown == b""
    rank.wait()
    assert rank.shown == b"[0] name? \n"
    rank.write(b"\nnext\n")
    assert rank.shown == b"[0] name? \n[0] next\n"


@pytest.mark.parametrize(
    ("first", "held", "rest"),
    [
        (b"caf", "é".encode()[:1], "é".encode()[1:]),
        (b"go ", "🚀".encode()[:3], "🚀".encode()[3:]),
        (b"", b"\x1b[3", b"1mred"),
    ],
)
def test_half_a_letter_and_half_a_colour_wait(
    rank: Rank, first: bytes, held: bytes, rest: bytes
) -> None:
    rank.write(first + held)
    rank.wait()
    assert rank.shown == (b"[0] " + first + b"\n" if first else b"")
    rank.write(rest + b"\n")
    assert rank.shown.endswith(b"[0] " + held + rest + b"\n")


@examples(80)
@given(pieces=st.lists(st.text("ab\r\né", max_size=5).map(str.encode), max_size=12))
def test_every_line_has_the_prefix_of_who_wrote_it(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    rank = Rank(tmp_path_factory.mktemp("rank"))
    for text in pieces:
        rank.write(text)
    rank.look(is_last=True)
    rank.feed.close()
    lines = b"".join(pieces).split(b"\n")
    lines = lines if lines[-1] else lines[:-1]
    shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
    assert rank.shown == b"".join(b"[0] " + line + b"\n" for line in shown)
