"""The example training: real Paddle, two real ranks over gloo, under fleetrun and without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from training import PYTHONS, ROOT, mostly
from waiting import TRAINING_S
from warming import warm

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.train

SCRIPT = ROOT / "scripts" / "train_resnet.py"
HAS = "import importlib.metadata as m; print(m.version('paddlepaddle'), m.version('fleetrun'))"
EPOCH = re.compile(r"^epoch \d+/\d+: loss ([\d.]+), test accuracy ([\d.]+)", re.MULTILINE)
WEIGHTS = re.compile(r"^rank (\d+): weights sha256 ([0-9a-f]{64})$", re.MULTILINE)


class Epoch(NamedTuple):
    """What rank 0 printed at the end of an epoch."""

    loss: float
    accuracy: float


def epochs(text: str) -> list[Epoch]:
    return [Epoch(float(loss), float(accuracy)) for loss, accuracy in EPOCH.findall(text)]


class Trial:
    """Runs one command at a time with one Paddle, in a folder of its own."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.folder = folder
        # Every descendant carries it, so none can hide from `survivors`.
        self.mark = f"TRIAL={uuid.uuid4()}"

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run this Paddle's python with WORDS; stdout and stderr come together."""
        name, _, value = self.mark.partition("=")
        environ = {**os.environ, **warm(self.python), **variables, name: value}
        return subprocess.run(
            [self.python, *words],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TRAINING_S,
            check=False,
        )

    def fleetrun(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run WORDS on two CPU ranks: these Paddles have no use for a GPU that may be here."""
        launch = ("-m", "fleetrun", "--nproc_per_node=2")
        return self.run(*launch, *words, CUDA_VISIBLE_DEVICES="", **variables)

    def logs(self) -> list[str]:
        """Read what each rank wrote."""
        return [
            path.read_text(encoding="utf-8", errors="replace")
            for path in sorted(self.folder.glob("log/workerlog.*"))
        ]

    def survivors(self) -> list[int]:
        """Find what still runs of all that was started here."""
        mark = self.mark.encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                except OSError:  # gone meanwhile
                    continue
                if mark in variables:
                    found.append(int(entry.name))
        return found


@pytest.fixture
def trial(version: str, tmp_path: Path) -> Iterator[Trial]:
    python = PYTHONS[version]
    have = ""
    if python.exists():
        asked = subprocess.run([python, "-c", HAS], capture_output=True, text=True, check=False)
        have = asked.stdout
    if not have.startswith(f"{version} "):
        reason = f"{python} has no Paddle {version} with fleetrun: scripts/test sets them up"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    trial = Trial(python, tmp_path)
    yield trial
    for pid in trial.survivors():
        os.kill(pid, signal.SIGKILL)


def assert_same_weights(logs: list[str]) -> None:
    found = [WEIGHTS.findall(log) for log in logs]
    assert [[rank for rank, _ in ranks] for ranks in found] == [["0"], ["1"]]
    assert found[0][0][1] == found[1][0][1]
    assert "all 2 ranks hold identical weights" in logs[0]


@pytest.mark.parametrize("version", mostly("3.3.1"))
def test_two_ranks_learn_to_read_digits_and_end_identical(trial: Trial) -> None:
    run = trial.fleetrun(SCRIPT, "--epochs=4")

    assert run.returncode == 0, run.stdout
    assert trial.survivors() == []
    logs = trial.logs()
    learned = epochs(logs[0])
    assert len(learned) == 4
    assert learned[-1].loss < learned[0].loss / 4
    assert learned[-1].accuracy > 0.95
    assert_same_weights(logs)
    # The console has the whole of rank 0's output.
    assert epochs(run.stdout) == learned


@pytest.mark.parametrize("version", mostly("2.6.2"))
def test_the_script_does_not_know_its_launcher(trial: Trial) -> None:
    launch = ("-m", "paddle.distributed.launch", "--nproc_per_node=2")
    run = trial.run(*launch, SCRIPT, "--epochs=1")

    assert run.returncode == 0, run.stdout
    logs = trial.logs()
    assert len(epochs(logs[0])) == 1
    assert_same_weights(logs)


@pytest.mark.parametrize("version", mostly("3.3.1"))
def test_a_lone_static_rank_learns(trial: Trial) -> None:
    run = trial.run(SCRIPT, "--static", "--epochs=2", "--save=weights")

    assert run.returncode == 0, run.stdout
    first, second = epochs(run.stdout)
    assert second.loss < first.loss
    assert (trial.folder / "weights" / "resnet.pdparams").stat().st_size > 0


@pytest.mark.parametrize("version", PYTHONS)
def test_static_ranks_that_paddle_cannot_connect_get_one_sentence(trial: Trial) -> None:
    run = trial.fleetrun(SCRIPT, "--static", "--epochs=1")

    assert run.returncode == 1
    assert trial.survivors() == []
    logs = trial.logs()
    # The other rank may have been stopped before it came to say it, too.
    assert any("--static with 2 ranks needs a GPU build of Paddle" in log for log in logs)
    assert not any('\n  File "' in log for log in logs)


@pytest.mark.parametrize("version", mostly("2.6.2"))
def test_the_deep_demo_shows_what_a_strategy_does(trial: Trial) -> None:
    # What is counted is the same in each update.
    words = ("--strategy=recommended", SCRIPT, "--depth=8")
    run = trial.fleetrun(*words, FLEETRUN_STOP_AFTER="4")

    assert run.returncode == 0, run.stdout
    counted = re.search(r"Allreduces: \d+ → (\d+) .*, of (\d+) gradients", run.stdout)
    assert counted is not None, run.stdout
    assert 4 <= int(counted[1]) <= 8
    assert 150 <= int(counted[2]) <= 160
    early = re.search(r"(\d+) of (\d+) allreduces went out before the last", run.stdout)
    assert early is not None, run.stdout
    assert (int(early[1]), early[2]) == (int(counted[1]) - 1, counted[1])
