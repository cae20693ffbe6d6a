"""`fleetrun logs` of real jobs: its lines, their order, and its end."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkout import environ
from click.shell_completion import ShellComplete
from commandline import Command, fleetrun, started
from waiting import LONG_S, until

from fleetrun.cli import parser

if TYPE_CHECKING:
    from terminals import Terminal

pytestmark = pytest.mark.slow

LOGS = [sys.executable, "-m", "fleetrun", "logs"]
# Ranks print in turns, each after the other's line was recorded.
TURNS = """
import re
def noted(log, size):
    run = os.path.dirname(os.path.realpath("/proc/self/fd/1"))
    # A rank may be faster than the launcher's first note.
    if not os.path.exists(f"{run}/output.times"):
        return False
    for line in open(f"{run}/output.times"):
        if line.split()[1:] == [str(size), log]:
            return True
    return False
for turn in range(6):
    if turn % 2 == rank:
        print(f"turn {turn}", flush=True)
    else:
        while not noted(f"workerlog.{turn % 2}", (turn // 2 + 1) * 7):
            time.sleep(0.01)
"""


def logs(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return fleetrun("logs", *words, folder=folder)


def logs_bytes(folder: Path, *words: str) -> bytes:
    with started("logs", *words, folder=folder) as reader:
        return reader.communicate(timeout=LONG_S)[0]


def shown(folder: Path, *words: str) -> str:
    done = logs(folder, *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_lines_of_all_ranks_stand_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    assert Command.python(tmp_path, TURNS).run().code == 0
    expected = "".join(f"[rank {turn % 2}] turn {turn}\n" for turn in range(6))
    assert shown(tmp_path) == expected
    assert shown(tmp_path, "--rank=1") == "turn 1\nturn 3\nturn 5\n"
    assert shown(tmp_path, "--grep", "turn [12]") == "[rank 1] turn 1\n[rank 0] turn 2\n"
    # Relative to now, and with the whole of the first line.
    assert shown(tmp_path, "--since=1h") == expected
    assert shown(tmp_path, "--since=0") == ""
    coloured = shown(tmp_path, "--color=always", "--grep=turn 0")
    assert coloured == "\x1b[36m[rank 0]\x1b[0m turn 0\n"


def test_what_a_bar_wrote_over_is_left_out_beside_other_ranks(tmp_path: Path) -> None:
    code = r"print('1%\r50%\r100%\ndone', end='')"
    assert Command.python(tmp_path, code).run().code == 0
    own = [f"[rank {rank}] {line}\n" for rank in (0, 1) for line in ("100%", "done")]
    assert sorted(shown(tmp_path).splitlines(keepends=True)) == sorted(own)
    assert logs_bytes(tmp_path, "--rank=1") == b"1%\r50%\r100%\ndone"


def test_attempts_and_failures_are_told_apart(tmp_path: Path) -> None:
    # The failing rank ends the other, so it waits until that has printed.
    script = """
echo "attempt $PADDLE_RESTART_COUNT"
touch said$R
until [ -e said0 ]; do sleep 0.01; done
[ $R.$PADDLE_RESTART_COUNT != 1.0 ] || exit 7
[ $R.$PADDLE_RESTART_COUNT != 0.0 ] || exec sleep 500
"""
    assert Command(tmp_path, script, "--max_restart=1").run().code == 0
    merged = shown(tmp_path).splitlines()
    assert sorted(merged[:2]) == ["[rank 0] attempt 0", "[rank 1] attempt 0"]
    assert sorted(merged[2:]) == ["[rank 0, attempt 1] attempt 1", "[rank 1, attempt 1] attempt 1"]
    assert shown(tmp_path, "--failed") == "attempt 0\n"
    assert sorted(shown(tmp_path, "--attempt=1").splitlines()) == [
        "[rank 0, attempt 1] attempt 1",
        "[rank 1, attempt 1] attempt 1",
    ]
    assert "there is no rank 2; the job has ranks 0-1" in logs(tmp_path, "--rank=2").stderr


def test_any_run_is_found_by_a_part_of_its_name(tmp_path: Path) -> None:
    for job in ("first", "second"):
        assert Command(tmp_path, f"echo {job}", f"--job_id={job}", ranks=1).run().code == 0
    assert shown(tmp_path) == "second\n"
    assert shown(tmp_path, "first") == "first\n"
    paths = sorted((tmp_path / "log" / "runs").iterdir())
    assert shown(tmp_path, str(paths[0])) == "first\n"
    assert shown(tmp_path, "first", "second") == "[rank 0] first\n[rank 0] second\n"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert shown(elsewhere, "--log_dir=../log") == shown(elsewhere, "../log") == "second\n"
    listed = shown(tmp_path, "--runs").splitlines()
    assert [line.split()[0] for line in listed] == ["run", paths[1].name, paths[0].name]
    assert all(" ".join(line.split()[3:]) == "rank 0 all processes finished" for line in listed[1:])
    unclear = logs(tmp_path, "-")
    assert (unclear.returncode, unclear.stderr[:21]) == (2, "fleetrun: - matches 2")
    both = logs(tmp_path, "--runs", "first")
    assert (both.returncode, both.stdout) == (2, "")
    assert both.stderr == "fleetrun: --runs lists all runs of --log_dir: leave first out.\n"
    missing = logs(tmp_path, "fifth")
    assert (missing.returncode, "no such run: fifth" in missing.stderr) == (2, True)


def is_latest(folder: Path, launcher: int) -> bool:
    return (folder / "log" / "latest").resolve().name.endswith(f"-{launcher}")


@pytest.mark.parametrize("command", ["logs", "top"])
def test_which_of_several_running_jobs_of_a_folder_is_meant_is_asked(
    command: str, tmp_path: Path
) -> None:
    jobs = []
    for name in ("a", "b"):
        wait = f"echo job {name}; touch up.{name}; until [ -e go ]; do sleep 0.01; done"
        job = Command(tmp_path, wait, ranks=1)
        jobs.append((job, launcher := job.start()))
        job.wait_for(f"up.{name}")
        # A launcher that is starved makes its links after others that were started later.
        until(partial(is_latest, tmp_path, launcher.pid))
    done = fleetrun(command, folder=tmp_path)
    runs = [path.name for path in (tmp_path / "log" / "runs").iterdir()]
    assert done.returncode == 2
    assert "2 jobs with logs in log run; name one, or a part of its name" in done.stderr
    assert all(run in done.stderr for run in runs)
    assert {shown(tmp_path, run) for run in runs} == {"job a\n", "job b\n"}
    (tmp_path / "go").touch()
    for job, launcher in jobs:
        assert job.finish(launcher).code == 0
    assert shown(tmp_path) == "job b\n"


def test_top_means_the_job_that_still_runs_not_a_newer_one_that_has_ended(tmp_path: Path) -> None:
    job = Command(tmp_path, "touch up; until [ -e go ]; do sleep 0.01; done", ranks=1)
    launcher = job.start()
    # A launcher that is starved makes its links after others that were started later.
    job.wait_for("up", "log/latest")
    assert Command(tmp_path, "echo newer", ranks=1).run().code == 0
    assert shown(tmp_path) == "newer\n"
    assert f"-{launcher.pid}" in fleetrun("top", "--once", folder=tmp_path).stdout.splitlines()[0]
    assert job.release(launcher).code == 0


@pytest.mark.parametrize("words", [(), ("--rank=1",), ("--grep=red",), ("--raw",)])
def test_a_terminal_acts_on_nothing_that_a_rank_has_printed_unless_it_is_wanted(
    tmp_path: Path, terminal: Terminal, words: tuple[str, ...]
) -> None:
    code = r"print('\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\b line')"
    assert Command.python(tmp_path, code).run().code == 0
    env = environ(TERM="xterm")
    with terminal.start([*LOGS, "--color=never", *words], env, tmp_path) as reader:
        assert reader.wait(LONG_S) == 0
    terminal.read()
    if words == ("--raw",):
        assert b"[rank 1] \x1b]0;title\x07\x1b[2J\x1b[31mred" in terminal.shown
    else:
        assert terminal.shown.endswith(b"red line\r\n")
        assert b"\x1b" not in terminal.shown
    # A file gets exactly what was printed.
    assert shown(tmp_path, "--rank=1").startswith("\x1b]0;title")


@pytest.mark.parametrize("rank", [None, "1"])
def test_following_shows_what_comes_and_ends_with_the_job(
    tmp_path: Path, terminal: Terminal, rank: str | None
) -> None:
    code = """
print(f"begin {rank}", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
print(f"half a li", end="", flush=True)
while not os.path.exists("end"): time.sleep(0.01)
print("ne\\nno end", end="")
"""
    job = Command.python(tmp_path, code)
    launcher = job.start()
    until(lambda: "started" in str(job.events()))
    words = ["-f", *([f"--rank={rank}"] if rank else [])]
    env = environ(TERM="xterm")
    reader = terminal.start([*LOGS, *words], env, tmp_path)
    until(terminal.shows(b"begin 1\r\n"))
    if not rank:
        until(terminal.shows(b"begin 0\r\n"))
    (tmp_path / "go").touch()
    if rank:
        # A single rank's output comes unchanged.
        until(terminal.shows(b"half a li"))
    assert reader.poll() is None
    (tmp_path / "end").touch()
    assert job.finish(launcher).code == 0
    assert reader.wait(LONG_S) == 0
    terminal.read()
    lines = terminal.shown.decode().replace("\r\n", "\n")
    if rank:
        assert lines == "begin 1\nhalf a line\nno end"
        return
    for number, colour in ((0, 36), (1, 33)):
        prefix = f"\x1b[{colour}m[rank {number}]\x1b[0m "
        own = [line.removeprefix(prefix) for line in lines.splitlines() if prefix in line]
        assert own == [f"begin {number}", "half a line", "no end"]


def test_following_ends_when_the_launcher_is_killed(tmp_path: Path) -> None:
    job = Command(tmp_path, "echo $R; touch written$R; exec sleep 500")
    launcher = job.start()
    until(lambda: sum(event["event"] == "started" for event in job.events()) == 2)
    job.wait_for("written0", "written1")
    launcher.kill()
    job.finish(launcher)
    assert sorted(shown(tmp_path, "-f").splitlines()) == ["[rank 0] 0", "[rank 1] 1"]


def test_following_knows_of_attempts_that_come(tmp_path: Path) -> None:
    script = 'echo "attempt $PADDLE_RESTART_COUNT"; [ $PADDLE_RESTART_COUNT = 1 ] || until '
    script += "[ -e go ]; do sleep 0.01; done; [ $PADDLE_RESTART_COUNT = 1 ]"
    job = Command(tmp_path, script, "--max_restart=1", ranks=1)
    launcher = job.start()
    until(lambda: "started" in str(job.events()))
    reader = started("logs", "-f", "--grep=attempt", folder=tmp_path)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"attempt 0\n"
    assert job.release(launcher).code == 0
    out, _ = reader.communicate(timeout=LONG_S)
    assert (out, reader.returncode) == (b"attempt 1\n", 0)


FLOOD = """
for count in range(4000):
    os.write(1, b"%d %09d %s\\n" % (rank, count, b"x" * 900))
    if count % 40 == 0: time.sleep(0.02)
"""


def flood(rank: int) -> bytes:
    return b"".join(b"%d %09d %s\n" % (rank, i, b"x" * 900) for i in range(4000))


def test_of_a_rotated_log_the_last_part_is_shown_and_followed(tmp_path: Path) -> None:
    job = Command.python(tmp_path, FLOOD, "--log_max_size=1M")
    launcher = job.start()
    until(lambda: "started" in str(job.events()))
    with (tmp_path / "followed").open("wb") as out:
        reader = started("logs", "-f", "--rank=1", folder=tmp_path, stdout=out)
        assert job.finish(launcher).code == 0
        assert reader.communicate(timeout=LONG_S)[1] == b""
    assert list((tmp_path / "log" / "latest").glob("workerlog.1.[0-9]*"))
    last = shown(tmp_path, "--rank=1").encode()
    assert last
    assert flood(1).endswith(last)
    followed = (tmp_path / "followed").read_bytes()
    assert followed.endswith(last)
    assert {*followed.splitlines()} <= {*flood(1).splitlines()}
    prefix = b"[rank 1] "
    merged = shown(tmp_path).encode().splitlines(keepends=True)
    own = [line.removeprefix(prefix) for line in merged if line.startswith(prefix)]
    assert b"".join(own) == last


def test_names_of_runs_are_completed(elsewhere: Path) -> None:
    assert Command(elsewhere, "true", ranks=1).run().code == 0
    [run] = (elsewhere / "log" / "runs").iterdir()
    items = ShellComplete(parser.ROOT, {}, "fleetrun", "X").get_completions(["logs"], run.name[:4])
    assert [item.value for item in items] == [run.name]
