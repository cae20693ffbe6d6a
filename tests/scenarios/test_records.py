"""The records of a launch for people and programs, through the real command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commandline import Command
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

WAIT_FOR_GO = "touch ready$R; until [ -e go ]; do sleep 0.01; done"


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


def test_s69_two_launches_at_once_do_not_mix(tmp_path: Path) -> None:
    jobs = [Command(tmp_path, f"echo {name}; {WAIT_FOR_GO}", ranks=1) for name in ("one", "two")]
    launchers = [job.start() for job in jobs]
    folders = tmp_path / "log" / "runs"
    jobs[0].wait_for("ready0")
    (tmp_path / "go").touch()
    done = [job.finish(process) for job, process in zip(jobs, launchers, strict=True)]
    assert [(end.code, end.out) for end in done] == [(0, b"one\n"), (0, b"two\n")]
    logs = sorted((folder / "workerlog.0").read_text() for folder in folders.iterdir())
    assert logs == ["one\n", "two\n"]


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


def test_s71_events_are_whole_when_the_launcher_is_killed(tmp_path: Path) -> None:
    job = Command(tmp_path, "touch ready$R; sleep 60", ranks=4)
    launcher = job.start()
    path = tmp_path / "log" / "latest" / "events.jsonl"
    until(lambda: path.exists() and path.read_text().count("started") == 4)
    launcher.kill()
    assert job.finish(launcher).code == -9
    assert path.read_text().endswith("\n")
    names = [event["event"] for event in job.events()]
    assert (names[:6], names[-1]) == (["launched", *["started"] * 4, "interrupted"], "finished")
