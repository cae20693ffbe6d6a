"""The records of a launch for people and programs, through the real command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commandline import Command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended


@pytest.mark.slow
def test_s67_only_one_rank_is_shown_but_the_one_that_fails_is_heard(tmp_path: Path) -> None:
    fail = "if [ $R = 29 ]; then echo alas >&2; exit 9; fi"
    job = Command(tmp_path, f"echo I am $R; touch ready$R; {fail}; sleep 60", ranks=32)
    done = job.run()
    assert done.code == 9
    # Rank 29 may be faster than rank 0's first line.
    assert done.out in {b"I am 0\n", b""}
    assert "rank 29 exited with 9" in done.stderr
    assert "I am 29\n    alas\n" in done.stderr
    assert "I am 28" not in done.stderr


def test_s69_a_second_launch_keeps_the_first_ones_logs(tmp_path: Path) -> None:
    for number in (1, 2):
        assert Command(tmp_path, f"echo launch {number}").run().code == 0
    launches = list((tmp_path / "log" / "runs").iterdir())
    outputs = {(folder / "workerlog.1").read_text(): folder.resolve() for folder in launches}
    assert sorted(outputs) == ["launch 1\n", "launch 2\n"]
    assert (tmp_path / "log" / "latest").resolve() == outputs["launch 2\n"]
    assert (tmp_path / "log" / "workerlog.1").read_text() == "launch 2\n"


def test_s71_events_tell_the_whole_story(tmp_path: Path) -> None:
    job = Command(tmp_path, "[ $R = 1 ] && exit 4; sleep 60")
    assert job.run().code == 4
    events = job.events()
    names = [event["event"] for event in events]
    end = ["exited", "signalled", "exited", "root_cause", "finished"]
    assert names == ["launched", "started", "started", *end]
    for event in events:
        assert event["schema"] == 2
        assert 0 < event["monotonic"] < event["time"]
    assert (events[3]["rank"], events[3]["code"], events[3]["signal"]) == (1, 4, None)
    assert (events[5]["rank"], events[5]["code"], events[5]["signal"]) == (0, None, "SIGTERM")
    assert (events[7]["exit_code"], events[7]["verdict"]) == (4, "rank 1 exited with 4")
