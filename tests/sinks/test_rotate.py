"""Rotated logs: no byte is lost or repeated, and the console shows all."""

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
from mounts import mounted
from timers import Timers

from fleetrun.errors import EnvironmentFault
from fleetrun.model import ExitStatus
from fleetrun.run.events import Exited, Finished, Outcome, Started
from fleetrun.sinks.console import Feed
from fleetrun.sinks.rotate import Rotation, can_collapse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleetrun.sinks.rotate import Cut

KIB = 1024
LIMIT = 256 * KIB


class Rank:
    """A log that is written, rotated and shown, one step at a time."""

    def __init__(self, folder: str, files: int = 3, prefix: bytes | None = None) -> None:
        self.path = f"{folder}/run/workerlog.0"
        os.mkdir(f"{folder}/run")
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.remarks: list[str] = []
        self.cuts: list[Cut] = []
        self.lost = 0
        self.feed = Feed(self.path, prefix)
        self.timers = Timers()
        plan = plans.plan(per_node=1, cwd=folder, log_dir=".", run_dir="run")
        job = plans.job(plan, log=self.remarks.append, log_max_bytes=LIMIT)
        self.rotation = Rotation(job, self._follow, files)
        self.rotation.prepare()
        self.rotation.open(self.timers)
        self.rotation.on_event(Started(0, "rank 0", 1, 0.0))

    def _follow(self, cut: Cut) -> None:
        self.cuts.append(cut)
        self.lost += self.feed.follow(cut)

    def write(self, data: bytes) -> None:
        """Write as a rank does."""
        assert os.write(self._fd, data) == len(data)

    def look(self) -> None:
        """Let a second pass."""
        assert self.timers.elapse("look")
        while self.timers.elapse("copy"):
            pass

    def show(self, *, is_last: bool = True) -> bytes:
        """Return all that the console would show now."""
        pieces = []
        while piece := self.feed.take(is_last=is_last, now=0.0, cursor=None):
            pieces.append(piece)
        # The console does this at its end.
        return b"".join(pieces) + (b"\n" if is_last and self.feed.is_open else b"")

    def parts(self) -> list[bytes]:
        """Return the content of the files, in order, without the hole."""
        contents: list[bytes] = []
        number = 1
        while Path(f"{self.path}.{number}").exists():
            contents.insert(0, Path(f"{self.path}.{number}").read_bytes())
            number += 1
        moved = sum(cut.length for cut in self.cuts if not cut.is_collapsed)
        return [*contents, Path(self.path).read_bytes()[moved:]]

    def close(self) -> None:
        """End."""
        self.rotation.close()
        self.feed.close()
        os.close(self._fd)


@pytest.fixture(params=["disk", "/dev/shm"])
def folder(request: pytest.FixtureRequest) -> Iterator[str]:
    where = None if request.param == "disk" else request.param
    with tempfile.TemporaryDirectory(dir=where) as name:
        try:
            can_collapse(name)
        except OSError as error:
            pytest.skip(f"{name}: {error}")
        yield name


@pytest.fixture
def rank(folder: str) -> Iterator[Rank]:
    rank = Rank(folder)
    yield rank
    rank.close()


def lines(count: int, begin: int = 0) -> bytes:
    return b"".join(b"%09d %s\n" % (i, b"x" * (i % 100)) for i in range(begin, begin + count))


def test_s68_the_parts_are_all_that_was_written(folder: str) -> None:
    rank = Rank(folder, files=100)
    written = b""
    for number in range(12):
        written += (more := lines(2000, 2000 * number))
        rank.write(more)
        rank.look()
    parts = rank.parts()
    assert len(parts) > 4
    assert b"".join(parts) == written
    # Its disk usage is within the limit.
    assert os.stat(rank.path).st_blocks * 512 <= LIMIT + 64 * KIB
    assert rank.show() == written
    assert rank.lost == 0
    rank.close()
    assert rank.remarks == []


def test_s68_the_newest_are_kept(folder: str) -> None:
    rank = Rank(folder, files=2)
    written = b""
    for number in range(10):
        written += (more := lines(4000, 4000 * number))
        rank.write(more)
        # It is shown in time.
        assert rank.show() == more
        rank.look()
    parts = rank.parts()
    assert len(parts) == 3
    assert written.endswith(b"".join(parts))
    names = {"workerlog.0", "workerlog.0.1", "workerlog.0.2"}
    assert {*os.listdir(f"{folder}/run")} == names
    rank.close()


def test_the_end_stays_where_the_report_looks_for_it(rank: Rank) -> None:
    rank.write(lines(20_000))
    rank.look()
    assert len(rank.cuts) > 1
    assert 64 * KIB <= len(rank.parts()[-1]) <= LIMIT


def test_a_log_within_the_limit_is_left_alone(rank: Rank) -> None:
    rank.write(b"x" * LIMIT)
    rank.look()
    assert rank.cuts == []
    assert rank.parts() == [b"x" * LIMIT]


def test_a_reader_who_stopped_does_not_keep_old_parts_alive(folder: str) -> None:
    rank = Rank(folder, files=2)
    written = b""
    for number in range(10):
        written += (more := lines(8000, 8000 * number))
        rank.write(more)
        rank.look()
    left = b"".join(rank.parts())
    assert rank.lost == len(written) - len(left) > 0
    assert rank.show() == left
    rank.close()


def test_somebody_may_empty_the_file(rank: Rank) -> None:
    rank.write(lines(8000))
    rank.look()
    assert len(rank.cuts) > 0
    assert rank.show() == lines(8000)
    os.truncate(rank.path, 0)
    rank.cuts.clear()
    assert rank.show() == b""
    rank.write(b"again\n")
    assert rank.show() == b"again\n"
    rank.look()
    rank.write(more := lines(8000))
    rank.look()
    assert rank.show() == more
    assert rank.remarks == []


def test_a_copy_that_is_not_finished_leaves_everything_as_it_was(folder: str, rank: Rank) -> None:
    # More than is copied in one turn.
    written = b"x" * (20 * 1024 * KIB)
    rank.write(written)
    rank.rotation._max_bytes = 16 * 1024 * KIB
    assert rank.timers.elapse("look")
    assert rank.timers.elapse("copy")
    assert Path(f"{rank.path}.part").exists()
    end = Exited(0, "rank 0", ExitStatus(0), 1.0)
    rank.rotation.on_event(end)
    rank.rotation.on_event(Finished(Outcome(None, (end,)), 1.0))
    assert not rank.timers.elapse("copy") or rank.cuts == []
    assert os.listdir(f"{folder}/run") == ["workerlog.0"]
    assert rank.parts() == [written]


def test_another_attempt_has_another_file(rank: Rank) -> None:
    rank.write(first := lines(3000))
    second = Path(f"{rank.path}.attempt1")
    second.write_bytes(lines(9000))
    rank.rotation.on_event(Started(0, "rank 0", 2, 1.0, attempt=1))
    rank.look()
    assert {cut.log for cut in rank.cuts} == {str(second)}
    assert Path(rank.path).read_bytes() == first


def test_a_folder_that_vanished_is_one_warning(folder: str, rank: Rank) -> None:
    os.rename(f"{folder}/run", f"{folder}/moved")
    for _ in range(3):
        rank.write(lines(8000))
        rank.look()
    assert len(rank.remarks) == 1
    assert "could not be rotated (No such file or directory)" in rank.remarks[0]


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 300_000), st.booleans(), st.booleans()), min_size=1, max_size=8
    ),
    prefix=st.sampled_from([None, b"", b"[rank 0] "]),
    is_short=st.booleans(),
)
@settings(examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_console_shows_each_line_once(
    folder: str, steps: list[tuple[int, bool, bool]], prefix: bytes | None, *, is_short: bool
) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        rank = Rank(fresh, files=100, prefix=prefix)
        written = shown = b""
        line = b"\xc3\xa9%06d\n" if is_short else b"%06d " + b"y" * 5000 + b"\n"
        for count, is_rotated, is_shown in steps:
            text = b"".join(line % i for i in range(count // len(line) + 1))
            # Writes do not end at line ends.
            more = text[: count + 1]
            written += more
            rank.write(more)
            if is_rotated:
                rank.look()
            if is_shown:
                shown += rank.show(is_last=False)
        shown += rank.show()
        assert b"".join(rank.parts()) == written
        rank.close()
    if prefix is not None:
        assert b"".join(prefix + line + b"\n" for line in written.splitlines()) == shown
    else:
        assert shown == written


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_where_it_cannot_work_nothing_starts(tmp_path: Path) -> None:
    with (
        mounted(tmp_path, "ramfs"),
        pytest.raises(EnvironmentFault, match=r"--log_max_size cannot work in .*--log_dir"),
    ):
        Rank(str(tmp_path))
