"""Simultaneous output of several ranks, as shown on the console."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.sinks.console import Feed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG_ENOUGH = 1.0


class Ranks:
    """Two ranks that write, and the console that reads them when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"workerlog.{rank}" for rank in range(2)]
        for path in self.paths:
            path.write_bytes(b"")
        self.feeds = [Feed(str(path), b"[%d] " % rank) for rank, path in enumerate(self.paths)]
        self.shown = b""
        self.now = 0.0
        self._cursor: Feed | None = None

    def write(self, rank: int, text: bytes) -> None:
        """Let RANK write TEXT, and the console look."""
        with self.paths[rank].open("ab") as file:
            file.write(text)
        self.look()

    def look(self, *, is_last: bool = False) -> None:
        """Let the console look until there is no more."""
        for feed in self.feeds:
            while piece := feed.take(is_last=is_last, now=self.now, cursor=self._cursor):
                self.shown += piece
                self._cursor = feed if feed.is_open else None

    def wait(self) -> None:
        """Let enough time pass that nothing is held back."""
        self.now += LONG_ENOUGH
        self.look()

    def close(self) -> None:
        """Close the files."""
        for feed in self.feeds:
            feed.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_a_bar_that_returns_before_it_is_drawn_keeps_its_prefix(ranks: Ranks) -> None:
    # tqdm writes like this.
    for share in (b"\r 10%|#", b"\r 20%|##"):
        ranks.write(0, share)
        ranks.wait()
    ranks.write(0, b"\n")
    assert ranks.shown == b"[0]  10%|#\r[0]  20%|##\n"


def test_a_piece_without_an_end_is_shown_after_a_while(ranks: Ranks) -> None:
    ranks.write(0, b"name? ")
    assert ranks.shown == b""
    ranks.wait()
    assert ranks.shown == b"[0] name? "
    ranks.write(0, b"thanks\nnext\n")
    assert ranks.shown == b"[0] name? thanks\n[0] next\n"


@pytest.mark.parametrize(("before", "rest"), [(b"10%\r", b"\nnext\n"), (b"10%", b"\nnext\n")])
def test_the_end_of_an_interrupted_line_is_no_line_of_its_own(
    ranks: Ranks, before: bytes, rest: bytes
) -> None:
    ranks.write(0, before)
    ranks.wait()
    ranks.write(1, b"hello\n")
    ranks.write(0, rest)
    assert ranks.shown == b"[0] " + before + b"\n[1] hello\n[0] next\n"


@pytest.mark.parametrize(
    ("first", "held", "rest"),
    [
        (b"caf", "é".encode()[:1], "é".encode()[1:]),
        (b"go ", "🚀".encode()[:3], "🚀".encode()[3:]),
        (b"", b"\x1b[3", b"1mred"),
    ],
)
def test_half_a_letter_and_half_a_colour_wait(
    ranks: Ranks, first: bytes, held: bytes, rest: bytes
) -> None:
    ranks.write(0, first + held)
    ranks.wait()
    assert ranks.shown == (b"[0] " + first if first else b"")
    ranks.write(0, rest)
    ranks.wait()
    assert ranks.shown == b"[0] " + first + held + rest


def seen(shown: bytes) -> list[bytes]:
    """Return the lines that a terminal shows after overwriting."""
    lines = []
    for line in shown.split(b"\n"):
        screen = bytearray()
        for part in line.split(b"\r"):
            screen[: len(part)] = part
        lines.append(bytes(screen))
    return lines


PIECES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.text("ab\r\né", max_size=5).map(str.encode),
        st.booleans(),
    ),
    max_size=12,
)


@examples(80)
@given(pieces=PIECES)
def test_every_line_on_the_screen_has_the_prefix_of_who_wrote_it(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bytes, bool]]
) -> None:
    with closing(Ranks(tmp_path_factory.mktemp("ranks"))) as made:
        for rank, text, waits in pieces:
            made.write(rank, text)
            if waits:
                made.wait()
        made.look(is_last=True)
    for rank, path in enumerate(made.paths):
        own = b"[%d] " % rank
        mine = [line for line in seen(made.shown) if line.startswith(own)]
        letters = b"".join(made.shown.split()).replace(b"[0]", b"\0").replace(b"[1]", b"\1")
        # Every letter that the rank wrote is shown, in its order, behind its prefix.
        wrote = b"".join(path.read_bytes().split())
        by = b"".join(
            part[1:]
            for part in letters.replace(b"\0", b"|\0").replace(b"\1", b"|\1").split(b"|")
            if part[:1] == b"%c" % rank
        )
        assert by == wrote
        assert all(line for line in mine)
    for line in filter(None, seen(made.shown)):
        assert line.startswith((b"[0] ", b"[1] ")), made.shown
