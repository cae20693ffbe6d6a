"""The example training: real Paddle, two real ranks over gloo, under fleetrun and without it."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import pytest
from training import PYTHONS, ROOT, mostly, run_marked

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

SCRIPT = ROOT / "scripts" / "train_resnet.py"
LAUNCH = ("-m", "fleetrun", "--nproc_per_node=2")
EPOCH = re.compile(r"^epoch \d+/\d+: loss ([\d.]+), test accuracy ([\d.]+)", re.MULTILINE)
WEIGHTS = re.compile(r"^rank (\d+): weights sha256 ([0-9a-f]{64})$", re.MULTILINE)


class Epoch(NamedTuple):
    """What rank 0 printed at the end of an epoch."""

    loss: float
    accuracy: float


def epochs(text: str) -> list[Epoch]:
    return [Epoch(float(loss), float(accuracy)) for loss, accuracy in EPOCH.findall(text)]


def train(
    version: str, folder: Path, *words: str | Path, code: int = 0, **variables: str
) -> tuple[str, list[str]]:
    """Run the Paddle of VERSION with WORDS, expect CODE; return the output and each rank's log."""
    python, is_ours = PYTHONS[version], "fleetrun" in words
    # These builds cannot use a GPU that is here; Paddle's launcher does without the variable.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if is_ours else {}
    done, left = run_marked(python, words, folder, **hidden, **variables)
    assert done.returncode == code, done.stdout
    assert not left or not is_ours
    logs = sorted(folder.glob("log/workerlog.*"))
    return done.stdout, [log.read_text(encoding="utf-8", errors="replace") for log in logs]


def assert_same_weights(logs: list[str]) -> None:
    (first,), (second,) = (WEIGHTS.findall(log) for log in logs)
    assert (first[0], second[0]) == ("0", "1")
    assert first[1] == second[1]
    assert "all 2 ranks hold identical weights" in logs[0]


@pytest.mark.parametrize("version", mostly("3.3.1"))
def test_two_ranks_learn_to_read_digits_and_end_identical(version: str, tmp_path: Path) -> None:
    output, logs = train(version, tmp_path, *LAUNCH, SCRIPT, "--epochs=2")
    learned = epochs(logs[0])
    assert len(learned) == 2
    assert learned[-1].loss < learned[0].loss / 4
    assert learned[-1].accuracy > 0.9
    assert_same_weights(logs)
    # The console has the whole of rank 0's output.
    assert epochs(output) == learned


@pytest.mark.long
@pytest.mark.parametrize("version", PYTHONS)
def test_the_script_does_not_know_its_launcher(version: str, tmp_path: Path) -> None:
    launch = ("-m", "paddle.distributed.launch", "--nproc_per_node=2")
    _, logs = train(version, tmp_path, *launch, SCRIPT, "--epochs=1")
    assert len(epochs(logs[0])) == 1
    assert_same_weights(logs)


@pytest.mark.parametrize("version", mostly("3.3.1"))
def test_a_lone_static_rank_learns(version: str, tmp_path: Path) -> None:
    words = (SCRIPT, "--static", "--depth=1", "--epochs=2", "--save=weights")
    first, second = epochs(train(version, tmp_path, *words)[0])
    assert second.loss < first.loss
    assert (tmp_path / "weights" / "resnet.pdparams").stat().st_size > 0


@pytest.mark.long
@pytest.mark.parametrize("version", PYTHONS)
def test_static_ranks_that_paddle_cannot_connect_get_one_sentence(
    version: str, tmp_path: Path
) -> None:
    _, logs = train(version, tmp_path, *LAUNCH, SCRIPT, "--static", "--epochs=1", code=1)
    # The other rank may have been stopped before it printed the same.
    assert any("--static with 2 ranks needs a GPU build of Paddle" in log for log in logs)
    assert not any('\n  File "' in log for log in logs)


def test_the_console_says_cpu_and_each_reason_once_in_120_columns(tmp_path: Path) -> None:
    options = ("--strategy=recommended", "--env=FLEETRUN_STOP_AFTER=4")
    output, _ = train("3.3.1", tmp_path, *LAUNCH, *options, SCRIPT, "--depth=8", "--epochs=1")
    lines = output.splitlines()
    ours = [line for line in lines if line.startswith("fleetrun: ")]
    assert sum("CPU" in line or "gloo" in line for line in ours) == 1
    assert "CPU with the gloo backend" in output
    assert "no action needed" not in output
    begin = next(n for n, line in enumerate(lines) if line.startswith("fleetrun: Strategy"))
    table = [lines[begin], *takewhile(lambda line: line.startswith("  "), lines[begin + 1 :])]
    assert max(map(len, table)) <= 120
    assert table[1].split() == ["field", "asked", "in", "effect", "status", "why"]
    asked = dict(line.split()[:2] for line in table[2:] if len(line.split()) > 1)
    assert asked["fuse_grad_size_in_MB"] == asked["nccl_comm_num"] == "auto"
    assert asked["use_hierarchical_allreduce"] == "auto"
    assert asked["sync_nccl_allreduce"] == "false"
    text = " ".join(" ".join(table).split())
    assert text.count("155 gradients in 6 allreduces (Paddle: 2)") == 1
    assert text.count("before the last gradient was ready") == 1
