"""Jobs of trainers on several hosts, which are loopback addresses: one roster, one verdict."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from typing import TYPE_CHECKING

import ports
import pytest
from commandline import Command
from meetings import Job, Meeting
from processes import supervisor_of
from waiting import patient, quick, until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from commandline import Ended

pytestmark = pytest.mark.slow

# Every run has its own job name: coordinators of such lists choose a port by it.
IPS = ("--ips=127.0.0.1,127.0.0.2", f"--job_id={uuid.uuid4().hex}")


def job_of(folder: Path, script: str, rows: Sequence[Sequence[str]]) -> Job:
    """Make a job with a host for each of ROWS, its options."""
    folders = [folder / f"host{number}" for number in range(len(rows))]
    for path in folders:
        path.mkdir()
    return Job(*(Command(at, script, *row, ranks=1) for at, row in zip(folders, rows, strict=True)))


def by_ips(folder: Path, script: str, *options: str) -> Job:
    """Make a job of two hosts that are known by name."""
    start = f"--start_port={ports.free(1)[0]}"
    rows = [(*IPS, f"--host=127.0.0.{i}", start, *options) for i in (1, 2)]
    return job_of(folder, script, rows)


def by_master(folder: Path, script: str, rows: Sequence[Sequence[str]], nnodes: int = 2) -> Job:
    """Make a job whose launchers meet at a port."""
    where = (f"--master=127.0.0.1:{ports.free(1)[0]}", f"--nnodes={nnodes}")
    return job_of(folder, script, [(*where, *row) for row in rows])


def codes(ended: Sequence[Ended]) -> list[int]:
    """Return the exit codes."""
    return [end.code for end in ended]


def test_all_hosts_resume_from_one_checkpoint_that_is_whole_on_each(tmp_path: Path) -> None:
    # The first attempt writes another checkpoint.
    script = """
echo "got $*" >>got
[ $PADDLE_RESTART_COUNT = 1 ] && exit 0
mkdir out/checkpoint-4; echo w >out/checkpoint-4/model.pdparams
echo {} >out/checkpoint-4/trainer_state.json
[ $R = 1 ] && exec sleep 60
until [ -e ../host1/out/checkpoint-4/trainer_state.json ]; do sleep 0.01; done; exit 5
"""
    job = by_ips(tmp_path, script, "--max_restart=1", "--resume_from=out")
    for command in job.commands:
        command.argv.append("--resume={checkpoint}")
        for number in (1, 2, 3):
            (command.folder / f"out/checkpoint-{number}").mkdir(parents=True)
            (command.folder / f"out/checkpoint-{number}/model.pdparams").write_text("w")
            (command.folder / f"out/checkpoint-{number}/trainer_state.json").write_text("{}")
    torn = job.commands[1].folder / "out/checkpoint-3/trainer_state.json"
    torn.write_text("")
    ended = job.start_all().finish()
    assert codes(ended) == [0, 0]
    for command, launcher in zip(job.commands, ended, strict=True):
        out = command.folder / "out"
        expected = [f"got --resume={out}/checkpoint-{number}" for number in (2, 4)]
        assert (command.folder / "got").read_text().splitlines() == expected
        partial = f"{out}/checkpoint-3 (trainer_state.json is empty on 127.0.0.2)"
        sentence = f"Resuming from {out}/checkpoint-2. Incomplete, and ignored: {partial}."
        assert sentence in launcher.stderr
    assert torn.exists()


def test_success_is_agreed(tmp_path: Path) -> None:
    # The second host's rank goes on when the first host's is done.
    job = by_ips(tmp_path, "[ $R = 1 ] && until [ -e go ]; do sleep 0.01; done; exit 0").start_all()
    until(lambda: "exited" in [event["event"] for event in job.commands[0].events()])
    assert job.launchers[0].poll() is None
    (tmp_path / "host1" / "go").touch()
    assert codes(job.finish()) == [0, 0]


@pytest.mark.parametrize("place", [0, 1])
def test_a_failure_has_one_verdict_with_its_last_lines(tmp_path: Path, place: int) -> None:
    fail = f"[ $R = {place} ] || exec sleep 60; echo last words; exit 7"
    job = by_ips(tmp_path, fail).start_all()
    ended = job.finish()
    assert codes(ended) == [7, 7]
    told = ended[1 - place].stderr
    assert f"Rank {place} exited with 7 on 127.0.0.{place + 1}: the job failed there first" in told
    assert "\n    last words\n" in told
    # The time that hosts wait for each other is before the start.
    at = {event["event"]: event["monotonic"] for event in job.commands[place].events()}
    report = job.commands[place].folder / "log" / "latest" / "report.json"
    after_s = json.loads(report.read_text())["culprit"]["after_s"]
    assert after_s == pytest.approx(at["exited"] - at["launched"], abs=0.002)


def test_all_hosts_start_again_together_with_one_counter(tmp_path: Path) -> None:
    # Both fail, which counts once.
    job = by_ips(tmp_path, "[ $PADDLE_RESTART_COUNT = 1 ] || exit 3", "--max_restart=1").start_all()
    assert codes(job.finish()) == [0, 0]
    for command in job.commands:
        started = [event for event in command.events() if event["event"] == "started"]
        assert [event["attempt"] for event in started] == [0, 1]


def test_who_makes_the_verdict_may_be_the_victim(tmp_path: Path) -> None:
    lost = "echo 'RuntimeError: Connection closed by peer [127.0.0.2]:1' >&2; exit 1"
    script = f"if [ $R = 0 ]; then trap '{lost}' TERM; touch up; sleep 60 & wait; fi; exit 5"
    assert codes(by_ips(tmp_path, script).start_all().finish()) == [5, 5]


@pytest.mark.parametrize(
    ("killed", "what"),
    [
        (1, "Interrupted by SIGKILL on 127.0.0.2"),
        (0, "Interrupted by SIGKILL on 127.0.0.1"),
    ],
)
def test_s28_s50_a_killed_launcher_is_noticed_and_named(
    tmp_path: Path, killed: int, what: str
) -> None:
    job = by_ips(tmp_path, "touch up; exec sleep 60", *quick(2.0)).start_all()
    job.wait_for("up")
    job.launchers[killed].kill()
    ended = job.finish()[1 - killed]
    assert ended.code == 137
    assert what in ended.stderr


def test_a_coordinator_that_stood_still_waits_on_for_the_others(tmp_path: Path) -> None:
    silence_s = patient(1.5)
    job = Meeting(tmp_path, "exit 0", "--nnodes=2", f"--heartbeat_timeout={silence_s}")
    supervisor, stopped_at = supervisor_of(job.start().pid), time.monotonic()
    os.kill(supervisor, signal.SIGSTOP)
    until(lambda: time.monotonic() > stopped_at + 1.5 * silence_s)
    os.kill(supervisor, signal.SIGCONT)
    job.start()
    assert job.ends() == [0, 0]


def test_s39_a_master_that_never_comes_is_named_with_its_port(tmp_path: Path) -> None:
    job = job_of(tmp_path, "touch up", [(*IPS, "--host=127.0.0.2", "--rdzv_timeout=1")]).start_all()
    (ended,) = job.finish()
    assert ended.code == 4
    assert "The coordinator (127.0.0.1:6166" in ended.stderr
    assert "connection refused" in ended.stderr


def test_s47_who_wants_another_job_is_refused_with_a_diff(tmp_path: Path) -> None:
    timeout = f"--rdzv_timeout={patient(5.0):.0f}"
    rows = [("--rank=0", timeout), ("--rank=1", timeout, "--run_mode=rpc")]
    ended = by_master(tmp_path, "touch up", rows).start_all().finish()
    assert codes(ended) == [4, 4]
    assert any("--run_mode differs from that of" in end.stderr for end in ended)
