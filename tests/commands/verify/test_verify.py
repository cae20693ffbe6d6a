"""Verifying real launches of a script that pretends to train, and records it like `inject`."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

import pytest
from commandline import fleetrun
from processes import MARKER, assert_no_survivors
from snapshot_script import SCRIPT

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

PLAIN = "Even two runs of plain Paddle differ"
CASES = {
    "equal": (0, "Equal: the weights are those of plain Paddle to the last bit, on 2"),
    "noisy speed": (
        0,
        "speed                      no difference measured: 0.5 to 2 updates/s, plain",
    ),
    "no difference": (
        0,
        "  no difference measured, equal in effect: 2 to 2 updates/s, plain Paddle ",
    ),
    "early": (0, "1, 2; none timed; the script ended after 2"),
    "wrong": (
        5,
        "comm_fusion and plain Paddle diverge at update 3: b.weight of rank 0 differs by 0.001 (",
    ),
    "plain is wrong": (
        5,
        "There, ranks of plain Paddle differ, which is wrong; the strategy's are equal.",
    ),
    "rounding": (0, "those of plain Paddle within rounding, on 2 ranks"),
    "chaotic": (0, "those of plain Paddle within rounding, on 2 ranks"),
    "hidden": (
        0,
        "plain Paddle within rounding as far as elements are recorded (others differ), on 2 ranks",
    ),
    "noisy": (0, f"{PLAIN}: b.weight of rank "),
    "unseeded": (
        5,
        "The runs cannot be compared: those that begin with different weights",
    ),
    "strategy fails": (5, "Not equal: plain Paddle trains, and with comm_fusion rank "),
    "plain fails": (1, "The runs cannot be compared: plain Paddle: rank "),
}


def verify(folder: Path, *words: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    marker = uuid.uuid4().hex
    done = fleetrun("verify", "--updates=8", *words, folder=folder, **{MARKER: marker})
    assert_no_survivors(marker)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named_and_noise_is_said_first(case: str, tmp_path: Path) -> None:
    code, words = CASES[case]
    # Two runs of each are enough to compare speeds.
    options = ["--strategy=comm_fusion", "--nproc_per_node=2", "--repeats=2"]
    done = verify(tmp_path, *options, "train.py", case)
    assert (done.returncode, done.stderr) == (code, "")
    assert words in done.stdout
    assert ".." not in done.stdout
    kept = json.loads((tmp_path / "verify" / "verify.json").read_text())
    assert kept["equal"] == (None if words.startswith("The runs cannot") else code == 0)
    if code == 0:
        speed = {
            "early": "too few updates to time",
            "noisy speed": "no difference",
            "no difference": "no difference",
        }.get(case, "2.000 times that of plain Paddle: 2 to 2 updates/s, plain Paddle 1 to 1")
        assert f"speed                      {speed}" in done.stdout
        results = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
        assert results[-1].startswith("Equal: ")
    if case == "unseeded":
        assert PLAIN in done.stdout.split("The runs cannot")[0]
    if case == "wrong":
        assert (kept["update"], kept["rank"], kept["parameter"]) == (3, 0, "b.weight")


@pytest.mark.slow
def test_a_command_that_launches_is_verified_with_its_own_log_folder(tmp_path: Path) -> None:
    command = ["python3", "-m", "paddle.distributed.launch", "--log_dir=its", "--nproc_per_node=2"]
    done = verify(tmp_path, "--set=fuse_grad_size_in_MB=1", "exec", *command, "train.py", "equal")
    assert (done.returncode, done.stderr) == (0, "")
    assert "of one run each, which --repeats=2 compares: 2 to 2 updates/s" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "expected"),
    [
        ("true", 5, "diverge at update 3: b.weight of rank 0 differs by 0.001 ("),
        ("exit 3", 1, "plain Paddle: it exited with 3, although a training succeeded: "),
    ],
)
def test_all_launches_of_a_command_and_its_own_end_count(
    end: str, code: int, expected: str, tmp_path: Path
) -> None:
    launch = "python3 -m paddle.distributed.launch --nproc_per_node=2"
    command = f"{launch} train.py wrong && {launch} --log_dir=its train.py equal && {end}"
    done = verify(tmp_path, "--set=fuse_grad_size_in_MB=1", "exec", "sh", "-c", command)
    assert (done.returncode, done.stderr) == (code, "")
    assert expected in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["train.py"], 2, "nothing to verify: give --strategy, or --set."),
        (
            ["--strategy=recommended"],
            2,
            "no script to verify: write `fleetrun verify --strategy=NAME [options] train.py`.",
        ),
        (["--strategy=gradient_merge", "t.py"], 2, "has nothing to compare with gradient_merge"),
        (["--strategy=amp", "--detach", "exec", "a"], 2, "verify takes no --detach"),
        (["--strategy=recommended", "t.py"], 3, "There is no script t.py in "),
    ],
)
def test_what_cannot_be_verified_is_said_before_anything_runs(
    words: list[str], code: int, problem: str, tmp_path: Path
) -> None:
    done = verify(tmp_path, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert problem in done.stderr
    assert not (tmp_path / "verify").exists()
