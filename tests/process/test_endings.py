"""The end of a job is reported by a line, a command, or a URL; that never harms the job."""

from __future__ import annotations

import json
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from processes import assert_no_survivors
from waiting import until

from fleetrun.run import notification, proc

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended


def loud(job: Command) -> Command:
    """Run JOB without --quiet."""
    job.argv.remove("--quiet")
    return job


@pytest.mark.parametrize(
    ("code", "word"), [(0, "Done after"), (7, "Failed after")], ids=["done", "failed"]
)
def test_the_last_line_says_how_long_how_far_and_how_it_ended(
    code: int, word: str, tmp_path: Path
) -> None:
    script = f'echo 30 >"$FLEETRUN_HEARTBEAT"; exit {code}'
    ended = loud(Command(tmp_path, script, ranks=1)).run()
    assert ended.code == code
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"fleetrun: {word} ")
    assert last.endswith(f"and 30 steps (exit code {code}).")


def test_a_quiet_launch_has_no_last_line(tmp_path: Path) -> None:
    assert Command(tmp_path, "true").run().stderr == ""


def test_a_command_is_told_how_the_job_ended_without_secrets(tmp_path: Path) -> None:
    options = (
        "--on_end=cat >ended.json; echo told",
        "--env=KEY_TOKEN=abcdef99",
        "--job_id=abcdef99",
    )
    ended = Command(tmp_path, "[ $R = 0 ] || exit 7; sleep 60", *options).run()
    assert ended.code == 7
    assert "told" in ended.stderr
    document = json.loads((tmp_path / "ended.json").read_text())
    assert (document["schema"], document["event"], document["job_id"]) == (1, "ended", "***")
    assert (document["exit_code"], document["rank"], document["signal"]) == (7, 1, None)
    assert (document["nodes"], document["processes"], document["attempts"]) == (1, 2, 1)
    assert document["verdict"] == "rank 1 exited with 7"


@pytest.mark.parametrize("command", ["exit 9", "no-such-command", "kill -9 $$"])
def test_a_command_that_fails_changes_no_exit_code(command: str, tmp_path: Path) -> None:
    ended = Command(tmp_path, "true", f"--on_end={command}").run()
    assert ended.code == 0
    assert "command of --on_end exited with" in ended.stderr


def test_a_command_that_hangs_is_left(tmp_path: Path) -> None:
    remarks: list[str] = []
    pids = tmp_path / "pids"
    command = f"echo $$ >{pids}; sleep 600 & echo $! >>{pids}; wait"
    notification.notify(command, "{}", remarks.append, timeout_s=2.0)
    assert remarks == ["The command of --on_end did not end in time and is killed."]
    for pid in pids.read_text().split():
        until(partial(_is_gone, pid))


def _is_gone(pid: str) -> bool:
    return proc.stat(pid) is None


def test_a_signal_ends_the_wait_and_not_the_exit_code(tmp_path: Path) -> None:
    job = Command(tmp_path, "exit 5", "--on_end=touch begun; exec sleep 600")
    launcher = job.start_until("begun")
    launcher.send_signal(signal.SIGTERM)
    assert job.finish(launcher).code == 5
    assert_no_survivors(job.marker)
