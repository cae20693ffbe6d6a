"""Tuning real launches of a script that pretends to train, and records it like `inject`."""

from __future__ import annotations

import json
import signal
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkout import environ
from commandline import fleetrun, started
from processes import MARKER, Job, assert_no_survivors

from fleetrun.commands import trials

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.slow

# Larger buckets are faster, 64 MB do not fit; the times are invented, so none is spent.
SCRIPT = """
import json, os, sys
rank = os.environ["PADDLE_TRAINER_ID"]
asked = json.load(open(os.environ["FLEETRUN_STRATEGY_FILE"]))["strategy"]
size = asked["fuse_grad_size_in_MB"]
if size == 64:
    raise MemoryError("64 MB are too many")
with open(os.environ["FLEETRUN_RECORDS"], "w") as file:
    for number in range(1, int(os.environ["FLEETRUN_STOP_AFTER"]) + 1):
        # The first steps are slow, and one rank is late.
        at = 100 + number / size if number > 2 else number
        record = {"number": number, "at": at + 0.001 * int(rank), "loss": 1 / number}
        print(json.dumps({"schema": 1, "kind": "update", **record}), file=file)
assert sys.argv[1:] == ["--steps=7"]
"""


def tune(folder: Path, *words: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    marker = uuid.uuid4().hex
    done = fleetrun("tune", *words, "train.py", "--steps=7", folder=folder, **{MARKER: marker})
    assert_no_survivors(marker)
    return done


def test_the_fastest_that_works_is_chosen_and_everything_is_kept(tmp_path: Path) -> None:
    done = tune(
        tmp_path,
        "--vary=fuse_grad_size_in_MB=3,4,64",
        "--env=A_TOKEN=b",
        "--steps=10",
        "--warmup=2",
        "--repeats=1",
        "--nproc_per_node=2",
        "--out=best",
    )
    assert done.returncode == 0, done.stderr
    first = next(line for line in done.stdout.splitlines() if line.startswith("1 "))
    assert first.split()[:3] == ["1", "4.00", "4.00-4.00"]
    assert "failed" in done.stdout
    assert "MemoryError: 64 MB are too many" in done.stdout
    assert "Add --set fuse_grad_size_in_MB=4 to your launch." in done.stdout
    kept = json.loads((tmp_path / "best" / "tune.json").read_text())
    assert kept["best"] == {"fuse_grad_size_in_MB": "4"}
    assert kept["candidates"][0]["peak_bytes"] > 1_000_000


def test_nothing_is_chosen_of_a_draw(tmp_path: Path) -> None:
    noisy = SCRIPT.replace("number / size", "number**1.2")
    options = "--vary=fuse_grad_size_in_MB=4,8", "--steps=10", "--warmup=2"
    done = tune(tmp_path, *options, script=noisy)
    assert done.returncode == 0, done.stderr
    assert "No difference measured: fuse_grad_size_in_MB=" in done.stdout
    assert "Fastest" not in done.stdout
    kept = json.loads((tmp_path / "tune" / "tune.json").read_text())
    assert (kept["best"], [drawn["fuse_grad_size_in_MB"] for drawn in kept["draw"]]) == (
        None,
        ["4", "8"],
    )


def test_a_run_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    options = ["--vary=fuse_grad_size_in_MB=1", "--timeout=1", "--repeats=1", "--nproc_per_node=1"]
    done = tune(tmp_path, *options, script="import time; time.sleep(60)")
    assert done.returncode == 1
    assert "it was stopped after 1 s" in done.stdout


def test_results_are_one_json_object_if_that_is_asked_for(tmp_path: Path) -> None:
    words = "--vary=fuse_grad_size_in_MB=1,64", "--json", "--warmup=2", "--repeats=1"
    done = tune(tmp_path, *words)
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "tune" / "tune.json").read_text())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_run_ends_with_the_command_that_started_it(
    tmp_path: Path, signum: signal.Signals
) -> None:
    script = "import pathlib, signal; pathlib.Path('runs').touch(); signal.pause()"
    (tmp_path / "train.py").write_text(script)
    job = Job(tmp_path)
    words = "tune", "--vary=fuse_grad_size_in_MB=1", "train.py"
    with started(*words, folder=tmp_path, env=environ(**{MARKER: job.marker})) as command:
        job.wait_for("runs")
        command.send_signal(signum)
        command.communicate()
    assert_no_survivors(job.marker)


def test_a_folder_of_another_command_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tune"
    folder.mkdir()
    with trials.held_folder(str(folder)):
        done = tune(tmp_path, "--vary=fuse_grad_size_in_MB=1")
    assert (done.returncode, done.stdout) == (3, "")
    assert "Another fleetrun tune or verify is using tune: " in done.stderr
    assert [path.name for path in folder.iterdir()] == [".lock"]
    with trials.held_folder(str(folder)):
        pass
