"""The comparison of ranks reports parameters that differ, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import pytest
from training import PYTHONS, evidence, in_turns, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train


OURS = {"fuse_grad_size_in_num": 2}
GOES_ON = "Paddle alone sums its gradients, as without fleetrun, so the job goes on"


def proofs(folder: Path) -> list[dict[str, Any]]:
    return [evidence(folder, rank) for rank in (0, 1)]


@pytest.mark.parametrize(("version", "strategy"), in_turns(OURS, {}))
def test_running_statistics_are_no_divergence_and_trained_parameters_are(
    version: str, strategy: dict[str, Any], tmp_path: Path
) -> None:
    ranks = train(PYTHONS[version], "running_statistics.py", tmp_path / "ours", strategy)
    # What goes wrong at the second update is reported after the third. A parameter that a forward
    # writes is compared if it has gradients. Paddle's own reducer may compute anything.
    differing = {"spoilt": (3, "0.weight of shape [3, 1, 3]"), "begun": (1, "scale of shape [8]")}
    differing["set"] = (1, "seen of shape [8]")
    for rank, proof in zip(ranks, proofs(tmp_path / "ours"), strict=True):
        for kind, (update, name) in differing.items():
            differ = f"after update {update} rank 1 and rank 0 differ in the parameter {name}"
            assert (differ in rank.pop(kind)) is bool(strategy), kind
            assert (f"{differ}: {GOES_ON}" in proof["notes"]) is not bool(strategy)
        assert proof["ranks_equal"] is False
        assert any("differ in 1._mean, 1._variance, which" in note for note in proof["notes"])
    assert [dict.fromkeys(rank, "") for rank in ranks] == ranks


def test_auto_finds_ranks_that_part_ways_late_and_asks_less_often_where_they_are_rounded(
    tmp_path: Path,
) -> None:
    ranks = train(PYTHONS["3.3.1"], "late.py", tmp_path / "ours", OURS, check_ranks="auto")
    for rank in ranks:
        text = "after update 64 rank 1 and rank 0 differ in the parameter 0.weight"
        assert text in rank["apart"]["stopped"]
        assert rank["apart"]["compared"] == [1, 2, 4, 8, 16, 32, 64]
        assert rank["rounded"]["stopped"] == ""
        assert rank["rounded"]["compared"] == [1, 2, 4, 8, 16, 32, 64, 128]
    for proof in proofs(tmp_path / "ours"):
        assert any("equal within rounding" in note for note in proof["notes"])


@pytest.mark.parametrize(("version", "strategy"), in_turns(OURS, {}))
def test_tables_with_sparse_gradients_may_differ(
    version: str, strategy: dict[str, Any], tmp_path: Path
) -> None:
    ranks = train(PYTHONS[version], "tables.py", tmp_path / "ours", strategy, check_ranks="auto")
    # Paddle's Adam may change one more row: it reads beyond the rows.
    differ = "after update 2 rank 1 and rank 0 differ in the parameter 0.weight"
    for rank, proof in zip(ranks, proofs(tmp_path / "ours"), strict=True):
        assert rank["sparse"] == ""
        assert (differ in rank["dense"]) is bool(strategy)
        left_out = "the ranks differ in 0.weight, which was not compared"
        assert any(note.startswith(left_out) for note in proof["notes"])


@pytest.mark.parametrize(
    # All four updates are skipped, or all but the fourth, after which `auto` compares as well.
    ("level", "is_proved"),
    [("O2", False), ("O1", True)],
)
def test_ranks_whose_scaler_skips_what_is_compared_prove_nothing(
    level: str, tmp_path: Path, *, is_proved: bool
) -> None:
    with devices.on("npu"):
        ranks = train(
            *(PYTHONS["3.3.1"], "halves.py", tmp_path / "ours", OURS),
            check_ranks="auto",
            more={"LEVEL": level},
        )
    moves = level == "O1"
    dtypes = ["FLOAT32" if moves else "FLOAT16"]
    assert ranks == [{"dtypes": dtypes, "is_scaled": True, "moved": moves}] * 2
    for proof in proofs(tmp_path / "ours"):
        assert proof["ranks_equal"] is (True if is_proved else None)
        assert proof["counts"]["skipped"] == (3 if moves else 4)
