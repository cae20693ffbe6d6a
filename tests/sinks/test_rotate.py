"""Rotated logs: no line is torn, and the console shows all that its reader takes in time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import plans
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timers import Timers

from fleetrun.run.events import Started
from fleetrun.sinks.console import Feed
from fleetrun.sinks.rotate import Rotation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fleetrun.sinks.rotate import Cut

LIMIT = 256 * 1024


class Rank:
    """A log that is written, rotated and shown, one step at a time."""

    def __init__(self, folder: str, prefix: bytes | None = None, *, is_shown: bool = True) -> None:
        self.path = f"{folder}/run/workerlog.0"
        os.mkdir(f"{folder}/run")
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.remarks: list[str] = []
        self.cuts: list[Cut] = []
        self.shown = b""
        self.feed = Feed(self.path, prefix)
        self.timers = Timers()
        plan = plans.plan(per_node=1, cwd=folder, log_dir=".", run_dir="run")
        job = plans.job(plan, log=self.remarks.append, log_max_bytes=LIMIT)
        # What else happens while its log is shown before a cut.
        self.during: Callable[[], None] = lambda: None
        show = (lambda: self.show(is_last=False)) if is_shown else lambda: None
        self.rotation = Rotation(job, show=show, follow=self._follow)
        self.rotation.open(self.timers)
        self.rotation.on_event(Started(0, "rank 0", 1, 0.0))

    def _follow(self, cut: Cut) -> None:
        self.cuts.append(cut)
        self.feed.follow(cut)

    def write(self, data: bytes) -> None:
        """Write as a rank does."""
        assert os.write(self._fd, data) == len(data)

    def look(self) -> None:
        """Let some time pass."""
        assert self.timers.elapse("look")

    def show(self, *, is_last: bool = True) -> None:
        """Show all that the console would show now."""
        self.during()
        while piece := self.feed.take(is_last=is_last, now=0.0):
            self.shown += piece

    def parts(self) -> list[bytes]:
        """Return the content of the files, in order."""
        archives = sorted(Path(self.path).parent.glob("workerlog.0.?"), reverse=True)
        return [path.read_bytes() for path in (*archives, Path(self.path))]

    def close(self) -> None:
        """End."""
        self.rotation.close()
        self.feed.close()
        os.close(self._fd)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(str(tmp_path))
    yield rank
    rank.close()


def lines(count: int, begin: int = 0) -> bytes:
    return b"".join(b"%09d %s\n" % (i, b"x" * (i % 100)) for i in range(begin, begin + count))


def test_a_line_is_not_torn_unless_it_never_ends(rank: Rank) -> None:
    rank.write(lines(8000) + b"half")
    rank.look()
    assert rank.cuts == []
    rank.write(b" a line\n")
    rank.look()
    assert rank.parts() == [lines(8000) + b"half a line\n", b""]
    rank.write(b"x" * (5 * LIMIT))
    rank.look()
    assert len(rank.cuts) == 2


def test_of_a_long_file_the_unfinished_line_stays(rank: Rank) -> None:
    rank.write(lines(20_000) + b"half")
    rank.look()
    assert rank.parts() == [lines(20_000), b"half"]
    rank.write(b" a line\n")
    rank.show()
    assert rank.shown == lines(20_000) + b"half a line\n"


@pytest.mark.parametrize("count", [3, 1000])
def test_a_rank_that_writes_while_its_log_is_copied_loses_nothing_unless_it_never_pauses(
    rank: Rank, count: int
) -> None:
    written = [lines(20_000)]
    rank.write(written[0])

    def write_more() -> None:
        if len(written) <= count:
            written.append(lines(10, begin=20_000 + 10 * len(written)))
            rank.write(written[-1])

    rank.during = write_more
    rank.look()
    assert len(rank.cuts) == 1
    archive, log = rank.parts()
    assert log == b""
    # What came after the last look at it is lost, and the console has it.
    assert archive == b"".join(written)[: len(archive)]
    assert archive.endswith(b"\n")
    assert (archive == b"".join(written)) is (count == 3)
    rank.during = lambda: None
    rank.write(b"new\n")
    rank.show()
    assert rank.shown == b"".join(written) + b"new\n"


def test_of_a_very_long_file_the_end_is_kept(rank: Rank) -> None:
    text = lines(60_000)
    rank.write(text)
    rank.look()
    archive, log = rank.parts()
    assert log == b""
    assert text.endswith(b"\n" + archive)
    assert len(archive) <= 4 * LIMIT


def test_a_reader_who_is_slow_misses_what_is_cut_off(tmp_path: Path) -> None:
    rank = Rank(str(tmp_path), is_shown=False)
    rank.write(lines(8000))
    rank.look()
    rank.write(b"new\n")
    rank.show()
    assert rank.shown == b"new\n"
    rank.close()


def test_a_folder_that_vanished_is_one_warning(tmp_path: Path, rank: Rank) -> None:
    os.rename(tmp_path / "run", tmp_path / "moved")
    for _ in range(3):
        rank.write(lines(8000))
        rank.look()
    assert len(rank.remarks) == 1
    assert "could not be rotated (No such file or directory)" in rank.remarks[0]


@given(
    steps=st.lists(st.tuples(st.integers(0, 300_000), st.booleans()), min_size=1, max_size=8),
    prefix=st.sampled_from([None, b"", b"[rank 0] "]),
    is_short=st.booleans(),
)
@settings(examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_console_shows_each_line_once(
    tmp_path: Path, steps: list[tuple[int, bool]], prefix: bytes | None, *, is_short: bool
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as fresh:
        rank = Rank(fresh, prefix)
        written = b""
        line = b"\xc3\xa9%06d\n" if is_short else b"%06d " + b"y" * 5000 + b"\n"
        for count, is_rotated in steps:
            # Writes do not end at line ends.
            more = b"".join(line % i for i in range(count // len(line) + 1))[: count + 1]
            written += more
            rank.write(more)
            if is_rotated:
                rank.look()
        rank.show()
        rank.close()
    if prefix is None:
        assert rank.shown == written
    else:
        assert rank.shown == b"".join(prefix + line + b"\n" for line in written.splitlines())
