"""Verifying real launches of a script that pretends to train, and records it like `inject`."""

from __future__ import annotations

import json
import math
import uuid
from array import array
from typing import TYPE_CHECKING

import pytest
from commandline import fleetrun
from processes import MARKER, assert_no_survivors
from snapshot_script import SCRIPT

from fleetrun.commands.verify import differences, verification
from fleetrun.commands.verify.differences import Value, ValueKey, Values, loss
from fleetrun.commands.verify.training_runs import Kind, VerifyRun
from fleetrun.rundir.rankfile import RankAxes

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

PLAIN = "Even two runs of plain Paddle differ"
CASES = {
    "equal": (0, "Equal: the weights and losses are those of plain Paddle to the last bit, on 2"),
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
    "wrong loss": (
        5,
        "The first parameter is b.weight of rank 0 (mp 0): it differs by 0.001 (0.00",
    ),
    "rounding": (0, "those of plain Paddle within rounding, on 2 ranks"),
    "chaotic": (0, "those of plain Paddle within rounding, on 2 ranks"),
    "hidden": (
        0,
        "4 parameters differ only in elements whose values are not recorded: a.weight of",
    ),
    "noisy": (0, f"{PLAIN}: b.weight of rank "),
    "ranks": (0, "Even the ranks of plain Paddle differ: rank 1 from rank 0 by 1 ("),
    "unseeded": (
        5,
        "This proves nothing: runs that begin with different weights always",
    ),
    "strategy fails": (5, "Not equal: plain Paddle trains, and with comm_fusion rank "),
    "plain fails": (1, "This proves nothing: plain Paddle: rank "),
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
    options = ["--strategy=comm_fusion", "--nproc_per_node=2"]
    done = verify(tmp_path, *options, "train.py", case)
    assert (done.returncode, done.stderr) == (code, "")
    assert words in done.stdout
    kept = json.loads((tmp_path / "verify" / "verify.json").read_text())
    assert kept["equal"] == (None if words.startswith("This proves nothing") else code == 0)
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
        assert PLAIN in done.stdout.split("This proves nothing")[0]
    if case == "ranks":
        differing = kept["plain_ranks_part_at"]
        assert (differing["rank"], differing["other_rank"], differing["allowed"] < 1e-3) == (
            1,
            0,
            True,
        )
    if case == "wrong":
        assert kept["parts_at"] == {
            "update": 3,
            "rank": 0,
            "parameter": "b.weight",
            "apart": pytest.approx(1e-3),
            "allowed": pytest.approx(0, abs=1e-4),
        }


@pytest.mark.slow
def test_a_command_that_launches_is_verified_with_its_own_log_folder(tmp_path: Path) -> None:
    command = ["python3", "-m", "paddle.distributed.launch", "--log_dir=its", "--nproc_per_node=2"]
    done = verify(tmp_path, "--set=fuse_grad_size_in_MB=1", "exec", *command, "train.py", "equal")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2.000 times that of plain Paddle" in done.stdout


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
    ("words", "problem"),
    [
        (["train.py"], "nothing to verify: give --strategy, or --set."),
        ([], "no script to verify: write `fleetrun verify --strategy=NAME [options] train.py`."),
        (["--log_dir=x", "train.py"], "verify takes no --log_dir: the logs of every run are kept"),
        (["--strategy=gradient_merge", "train.py"], "has nothing to compare with gradient_merge"),
    ],
)
def test_what_cannot_be_verified_is_said_before_anything_runs(
    words: list[str], problem: str, tmp_path: Path
) -> None:
    done = verify(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert not (tmp_path / "verify").exists()


def held(value: float, *, kind: int = 0) -> Value:
    return Value("w", kind, "float32", 1, hash(value), abs(value), array("d", [value]))


@pytest.mark.parametrize(
    ("kind", "differing", "is_found"),
    [
        # Of dp 2, sharding 2, mp 2: rank 1 is the other half of what is distributed; rank 2 has
        # another slice; rank 4 must be equal.
        *((0, rank, True) for rank in (1, 2, 4)),
        *((1, rank, rank != 1) for rank in (1, 2, 4)),
        *((2, rank, rank != 2) for rank in (1, 2, 4)),
        (-1, 4, False),
    ],
)
def test_ranks_that_hold_other_parts_may_differ(
    kind: int, differing: int, *, is_found: bool
) -> None:
    axes = RankAxes((("dp", 2), ("sharding", 2), ("mp", 2)))
    # A rank at the same place as the differing one differs, too.
    run = {
        ValueKey(1, rank, 0): held(float(rank == differing), kind=kind) for rank in (0, differing)
    }
    assert (differences.ranks_apart(run, axes) is not None) == is_found


def test_numbers_that_are_none_are_equal_to_each_other_alone() -> None:
    runs = [
        {ValueKey(1, 0, 0): held(value), ValueKey(1, 0): loss(value)} for value in (math.nan, 1.0)
    ]
    assert differences.apart(runs[0], {ValueKey(1, 0): loss(math.nan)}) == {}
    differing = differences.apart(*runs)
    assert [*differing.values()] == [math.inf] * 2
    assert len(differences.beyond(runs[0], [differing], [])) == 2


def test_losses_within_the_noise_of_plain_runs_are_equal() -> None:
    plain, again, other = ({ValueKey(1, 0): loss(value)} for value in (1.0, 1.1, 1.2))
    noise = differences.apart(plain, again)
    differing = differences.apart(plain, other)
    assert not differences.beyond(plain, [differing], [noise])
    assert differences.beyond(plain, [differing], [])


def test_weights_that_are_alike_by_chance_are_no_measure_of_noise() -> None:
    def weights(*values: float) -> Values:
        return {ValueKey(1, 0, 0, at): held(value) for at, value in enumerate(values)}

    # A bias begins with zeros in each run, though the others differ from the beginning.
    first, again = weights(1.0, 2.0, 0.01), weights(3.0, 1.5, 0.01)
    differing = differences.apart(first, weights(0.5, 2.5, -0.01))
    assert not differences.beyond(first, [differing], [differences.apart(first, again)])
    # A few of them say nothing about the others.
    noise = differences.apart(first, weights(1.0, 2.0, 3.0))
    parted = differences.beyond(first, [differing], [noise])
    assert [difference.apart for difference in parted] == [0.5, 0.5]


def test_losses_that_were_printed_have_no_update() -> None:
    plain, strategy = (
        VerifyRun(
            Kind("run", has_strategy=value > 1),
            "",
            values={ValueKey(9, 0, 0): held(value), ValueKey(2, 0): loss(value)},
            are_printed=True,
        )
        for value in (1.0, 2.0)
    )
    outcome = verification.judge([plain, strategy])
    assert [difference.key.update for difference in outcome.parted] == [9, 2]
    place = verification._where(outcome, outcome.parted[1])
    assert place == "loss 2 that rank 0 printed differs by 1"


def test_runs_of_different_updates_are_not_compared() -> None:
    first, other = ({ValueKey(update, 0, 0): held(1.0)} for update in (1, 2))
    assert "has not made the same updates" in differences.fault(first, other)


def test_the_largest_elements_tell_of_differences_between_the_recorded_ones() -> None:
    first, second = (
        {ValueKey(1, 0, 0): held(1.0)._replace(size=9, checksum=n, largest=n)} for n in (1, 5)
    )
    assert [*differences.apart(first, second).values()] == [4.0]
