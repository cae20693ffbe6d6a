"""`fleetrun ps`, `stop` and `attach` find jobs of this user in /proc, and act on the named one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commandline import Command, fleetrun, process_in_background, started
from processes import assert_no_survivors
from terminals import state
from waiting import LONG_S, until

from fleetrun.cli import app
from fleetrun.commands import job_commands
from fleetrun.host import jobs
from fleetrun.host.jobs import RunningJob

pytestmark = pytest.mark.slow

HOLD = 'trap "touch asked.$R; exit 0" TERM; touch up.$R; sleep 1000 & wait'


def listed(word: str) -> list[dict[str, Any]]:
    done = fleetrun("ps", "--json", word)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def detached(command: Command) -> int:
    """Start COMMAND in the background and return its launcher's process id."""
    done = command.detach()
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return process_in_background(done.stderr)


def test_a_job_is_listed_with_what_it_runs_and_stopped_with_its_grace(tmp_path: Path) -> None:
    command = Command(tmp_path, f"setsid -f sleep 1000; {HOLD}")
    launcher = command.start()
    command.wait_for("up.0", "up.1")
    # The plan is written a moment later.
    until((tmp_path / "log" / "latest" / "plan.json").exists)
    (job,) = listed(str(launcher.pid))
    assert (job["job"], job["pid"], job["wanted"]) == ("default", launcher.pid, 2)
    assert len(job["processes"]) == 2
    assert job["folder"] == str(tmp_path)
    assert job["run_dir"] == str((tmp_path / "log" / "latest").resolve())
    table = fleetrun("ps", job["name"]).stdout.splitlines()
    assert table[0].split() == list(job_commands.HEADS)
    assert table[1].split()[:2] == [str(launcher.pid), Path(command.argv[-1]).name]
    assert "2 of 2" in table[1]

    done = fleetrun("stop", str(launcher.pid))
    assert (done.returncode, done.stdout) == (0, "")
    script = Path(command.argv[-1]).name
    ended = f"fleetrun: {script} (process {launcher.pid}) has ended: interrupted by SIGTERM\n"
    assert done.stderr == ended
    assert command.finish(launcher).code == 128 + signal.SIGTERM
    assert (tmp_path / "asked.0").exists()
    assert not [running for running in jobs.find() if running.launcher == launcher.pid]


def test_the_job_of_this_folder_is_meant_and_a_second_one_says_whose_names_it_takes(
    tmp_path: Path,
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here, there = (Command(tmp_path / name, HOLD, ranks=1) for name in ("here", "there"))
    launchers = [here.start(), there.start()]
    here.wait_for("up.0")
    there.wait_for("up.0")
    second = Command(here.folder, "true", ranks=1)
    second.argv.remove("--quiet")
    output = second.run().stderr
    pid = launchers[0].pid
    assert f"-{Path(here.argv[-1]).name}-{pid} (process {pid}) still runs in this folder" in output
    refused = fleetrun("stop", folder=tmp_path)
    assert refused.returncode == 2
    assert "stop: no job of yours runs in this folder; name one that runs" in refused.stderr
    assert f"{pid} ({Path(here.argv[-1]).name}) in {here.folder}" in refused.stderr
    assert fleetrun("stop", folder=here.folder).returncode == 0
    here.finish(launchers[0])
    assert [running.launcher for running in jobs.find() if running.launcher == launchers[1].pid]
    assert fleetrun("stop", str(launchers[1].pid)).returncode == 0
    there.finish(launchers[1])


def test_stop_now_does_not_wait_for_those_who_take_their_time(tmp_path: Path) -> None:
    command = Command(tmp_path, 'trap "" TERM; touch up.$R; sleep 1000', "--grace=900")
    launcher = command.start()
    command.wait_for("up.0", "up.1")
    assert fleetrun("stop", "--now", str(launcher.pid)).returncode == 0
    command.finish(launcher)


def test_a_job_that_ctrl_z_has_stopped_is_stopped_for_good(tmp_path: Path) -> None:
    command = Command(tmp_path, HOLD)
    launcher = command.start()
    command.wait_for("up.0", "up.1")
    launcher.send_signal(signal.SIGTSTP)
    until(lambda: state(launcher.pid) == "T")
    assert fleetrun("stop", str(launcher.pid)).returncode == 0
    assert command.finish(launcher).code == 128 + signal.SIGTERM
    assert (tmp_path / "asked.0").exists()


def test_what_a_killed_launcher_left_behind_is_found_and_ended() -> None:
    name = f"20250102T030405Z-lost-{os.getpid()}"
    environ = {**os.environ, "FLEETRUN_JOB": name, "FLEETRUN_RUN_DIR": "/nowhere"}
    with subprocess.Popen(["sleep", "1000"], env=environ, start_new_session=True) as orphan:
        (job,) = listed(name)
        assert (job["pid"], job["processes"]) == (None, [orphan.pid])
        assert fleetrun("ps", name).stdout.splitlines()[1].split()[:2] == ["killed", name]
        done = fleetrun("attach", name)
        assert done.returncode == 3
        assert "was killed; its logs are in /nowhere." in done.stderr
        done = fleetrun("stop", name)
        assert (done.returncode, orphan.wait(LONG_S)) == (0, -signal.SIGKILL), done.stderr
        assert done.stderr == f"fleetrun: {name} has ended: its launcher had been killed.\n"


def test_a_detached_job_goes_on_and_its_console_can_be_watched(tmp_path: Path) -> None:
    command = Command(
        tmp_path, "echo first; until [ -e go ]; do sleep 0.1; done; echo last; exit 7", ranks=1
    )
    pid = detached(command)
    (job,) = listed(str(pid))
    assert job["pid"] == pid
    # It has no terminal, and its own session.
    assert os.getsid(pid) == pid
    watcher = started("attach", str(pid))
    assert watcher.stdout is not None
    while watcher.stdout.readline() != b"first\n":
        pass
    (tmp_path / "go").touch()
    out, err = watcher.communicate(timeout=LONG_S)
    assert watcher.returncode == 7, err
    assert b"last\n" in out
    assert b"exited with 7" in out
    assert_no_survivors(command.marker)
    assert not [path for path in (tmp_path / "log").iterdir() if path.name.startswith(".console")]


def test_leaving_the_console_leaves_the_job(tmp_path: Path) -> None:
    command = Command(tmp_path, f"echo first; {HOLD}", ranks=1)
    pid = detached(command)
    watcher = started("attach", str(pid))
    assert watcher.stdout is not None
    while watcher.stdout.readline() != b"first\n":
        pass
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=LONG_S)
    assert (watcher.returncode, err) == (130, b"")
    assert [running.launcher for running in jobs.find() if running.launcher == pid] == [pid]
    assert fleetrun("stop", str(pid)).returncode == 0
    assert_no_survivors(command.marker)


def test_what_cannot_start_in_the_background_says_so_in_front(tmp_path: Path) -> None:
    command = Command(tmp_path, "true")
    command.argv[-1] = "nosuch.py"
    command.argv.insert(3, "--detach")
    ended = command.run()
    assert ended.code == 3
    assert "There is no script nosuch.py" in ended.stderr
    assert list((tmp_path / "log").iterdir()) == []


def test_a_job_with_its_console_elsewhere_is_left_to_its_logs(tmp_path: Path) -> None:
    command = Command(tmp_path, HOLD)
    launcher = command.start()
    command.wait_for("up.0", "up.1")
    done = fleetrun("attach", str(launcher.pid))
    assert (done.returncode, done.stdout) == (3, "")
    assert "was not started with --detach; `fleetrun logs -f " in done.stderr
    assert fleetrun("stop", str(launcher.pid)).returncode == 0
    command.finish(launcher)


JOBS = (
    RunningJob("20250101T000000Z-a-11", "/nowhere", 11, ()),
    RunningJob("20250102T000000Z-a-12", "/nowhere", 12, ()),
    RunningJob("20250103T000000Z-b-13", "/nowhere", None, ()),
)


@pytest.mark.parametrize(
    ("word", "meant"), [("11", 0), ("20250102T000000Z-a-12", 1), ("20250103T", 2)]
)
def test_a_job_is_meant_by_its_number_its_name_or_the_beginning_of_that(
    word: str, meant: int
) -> None:
    assert job_commands.selected(word, JOBS, "stop") == JOBS[meant]


@pytest.mark.parametrize("word", ["zzz", ""])
@pytest.mark.parametrize("command", ["ps", "stop", "attach", "stacks"])
def test_a_job_that_does_not_run_is_an_error_of_each_command(
    word: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "find", lambda: JOBS)
    assert app.main([command, word], environ={}) == 2
    told = f'{command}: no job "{word}" runs on this host; `fleetrun ps` lists what does.'
    assert capsys.readouterr() == ("", f"fleetrun: {told}\n")


def test_without_any_job_the_list_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "find", lambda: ())
    assert app.main(["ps", "zzz"], environ={}) == 0
    assert capsys.readouterr().out == "No job of yours runs on this host.\n"
