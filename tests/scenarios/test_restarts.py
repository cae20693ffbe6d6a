"""A failed job is started again, as often as that can help."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from processes import supervisor_of
from waiting import until

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.extended

# Both ranks print this before one of them ends the attempt.
COUNT = """
SAID=said.$PADDLE_RESTART_COUNT
echo try $PADDLE_RESTART_COUNT of $R at $PADDLE_TRAINER_ENDPOINTS
touch $SAID.$R; until [ -e $SAID.0 ] && [ -e $SAID.1 ]; do sleep 0.01; done
"""


def test_s52_the_second_attempt_may_succeed_and_each_keeps_its_log(tmp_path: Path) -> None:
    job = Command(tmp_path, COUNT + "exit $((3 * (PADDLE_RESTART_COUNT == 0)))", "--max_restart=3")
    done = job.run()
    assert done.code == 0
    run = tmp_path / "log" / "latest"
    assert (run / "workerlog.1").read_text().startswith("try 0 of 1")
    assert (run / "workerlog.1.attempt1").read_text().startswith("try 1 of 1")
    assert job.log(1).read_text().startswith("try 1 of 1")


def test_each_attempt_resumes_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    # The first attempt saves one checkpoint after TERM, and leaves another one half-written.
    saves = """
echo "got $*"
[ $PADDLE_RESTART_COUNT = 1 ] && exit 0
mkdir -p out/checkpoint-2 out/checkpoint-1
trap 'echo w >out/checkpoint-1/model.pdparams
echo {} >out/checkpoint-1/trainer_state.json; exit 0' TERM
: >out/checkpoint-2/model.pdparams
[ $R = 0 ] && touch ready
until [ -e ready ]; do sleep 0.01; done
[ $R = 1 ] && exit 5
sleep 60 & wait
"""
    job = Command(tmp_path, saves, "--max_restart=1", "--resume_from=out")
    job.argv += ["--resume", "{checkpoint}", "--from={checkpoint}", "{other}"]
    job.argv.remove("--quiet")
    done = job.run()
    newest = tmp_path / "out" / "checkpoint-1"
    assert done.out.decode().splitlines() == [
        "got {other}",
        f"got --resume {newest} --from={newest} {{other}}",
    ]
    assert "Starting from scratch: there is no complete checkpoint in out." in done.stderr
    assert f"Resuming from {newest}. Incomplete, and ignored: " in done.stderr
    assert "out/checkpoint-2 (model.pdparams is empty)." in done.stderr


@pytest.mark.slow
def test_s53_no_progress_ends_it_early(tmp_path: Path) -> None:
    done = Command(tmp_path, "echo alas >&2; exit 4", "--max_restart=9", ranks=1).run()
    assert done.code == 4
    assert done.out.decode().count("alas") == 3
    assert "no progress" in done.stderr


# Rank 1 raises; rank 0, which is shown, fails because of that, and does not end before it is asked.
RAISES_ONCE = """
import threading
def load():
    raise ValueError("no such column: label")
if os.environ["PADDLE_RESTART_COUNT"] != "0":
    sys.exit()
if rank == 1:
    while not os.path.exists("ready"): time.sleep(0.01)
    load()
import signal
def lose(*_):
    sys.stderr.write("Connection closed by peer\\n" * 20000)
    raise SystemExit(1)
signal.signal(signal.SIGTERM, lose)
open("ready", "w").close()
threading.Event().wait()
"""


def test_a_restart_says_why_in_one_line_after_what_the_victims_printed(tmp_path: Path) -> None:
    job = Command.python(tmp_path, RAISES_ONCE, "--max_restart=3")
    output = tmp_path / "output"
    with output.open("wb") as file:
        done = job.run(stdout=file, stderr=file)
    assert done.code == 0
    *_, last, announced = output.read_text().splitlines()
    assert last == "Connection closed by peer"
    why = r"rank 1 failed: ValueError: no such column: label \(script-\w+\.py:6\)"
    assert re.fullmatch(rf"fleetrun: {why}\. Restart 1 of 3\.", announced)
    report = json.loads((tmp_path / "log/latest/report.json").read_text())
    assert (report["outcome"], report["exit_code"]) == ("all processes finished", 0)
    assert report["culprit"] is None
    assert re.fullmatch(why, report["earlier"][0])
    assert report["restarts"][0]["why"] == report["earlier"][0]
    events = {event["event"]: event for event in job.events()}
    assert events["recovered"]["why"] == report["earlier"][0]
    assert events["root_cause"]["error"].startswith("ValueError: no such column: label (script-")


def test_s55_all_are_dead_before_any_is_born_and_ports_are_new(tmp_path: Path) -> None:
    slow = COUNT + "[ $PADDLE_RESTART_COUNT = 1 ] && exit 0; [ $R = 1 ] && exit 9; exec sleep 60"
    job = Command(tmp_path, slow, "--max_restart=1", ranks=3)
    done = job.run()
    assert done.code == 0
    events = [(e["event"], e.get("attempt")) for e in job.events()]
    last_death = max(i for i, event in enumerate(events) if event == ("exited", 0))
    assert events.index(("started", 1)) > last_death
    first, second = (line.split()[-1] for line in done.out.decode().splitlines())
    assert not set(first.split(",")) & set(second.split(","))


def test_s35_a_stop_between_two_attempts_starts_nothing_more(tmp_path: Path) -> None:
    # Another attempt would wait for the stop, however late.
    fails = COUNT + "[ $PADDLE_RESTART_COUNT = 0 ] && exit 3; exec sleep 60"
    job = Command(tmp_path, fails, "--max_restart=5")
    errors = tmp_path / "said"
    with errors.open("wb") as file:
        launcher = job.start(stderr=file)
    # The first failure counts, so the attempt must be over.
    until(lambda: b"Restart 1 of 5" in errors.read_bytes())
    launcher.terminate()
    done = job.finish(launcher)
    assert done.code == 143


def logs_open_in(launcher: subprocess.Popen[bytes]) -> list[str]:
    """Return the names of the log files that LAUNCHER has open."""
    logs = []
    for link in Path(f"/proc/{supervisor_of(launcher.pid)}/fd").iterdir():
        # A file that was closed since it was listed does not count.
        with suppress(FileNotFoundError):
            logs.append(link.readlink().name)
    return sorted(name for name in logs if "log." in name)


def test_an_attempts_output_is_shown_whole_and_closed_before_the_next_ones(tmp_path: Path) -> None:
    script = """
if [ $PADDLE_RESTART_COUNT = 2 ]; then echo now; until [ -e go ]; do sleep 0.01; done; exit; fi
[ $R = 1 ] && exec sleep 60
printf half; exit $((5 + PADDLE_RESTART_COUNT))"""
    job = Command(tmp_path, script, "--max_restart=2", "--tee")
    launcher = job.start()
    until((tmp_path / "log/latest/workerlog.1.attempt2").exists)
    until(lambda: logs_open_in(launcher) == ["workerlog.0.attempt2", "workerlog.1.attempt2"])
    done = job.release(launcher)
    assert done.code == 0
    shown = done.out.splitlines()
    assert shown[:2] == [b"[rank 0] half"] * 2
    assert sorted(shown[2:]) == [b"[rank 0] now", b"[rank 1] now"]
