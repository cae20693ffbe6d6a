"""fleetrun's reducer in real trainings of two ranks, compared with Paddle's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, assert_as_alone, evidence, mostly, train, train_as_alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train


MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}}


def test_a_model_with_sparse_gradients_is_left_to_paddles_own_reducer(tmp_path: Path) -> None:
    fused, python = {"fuse_grad_size_in_num": 4, "nccl_comm_num": 2}, PYTHONS["3.3.1"]
    plain = train(python, "parts.py", tmp_path / "plain", None)
    ranks = train(python, "parts.py", tmp_path / "fused", fused)
    for theirs, ours in zip(plain, ranks, strict=True):
        assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-6)
        assert ours["none"]
    proof = evidence(tmp_path / "fused")
    # Twelve dense gradients, four in each bucket, and a sparse one.
    assert proof["counts"]["allreduces"] == 4
    status = {field["name"]: field["status"] for field in proof["fields"]}
    assert status == {"fuse_grad_size_in_num": "effective", "nccl_comm_num": "no_effect"}


WRITES = "the script writes weights between the backwards of one update"
CHANGES = "the script changes gradients by hand between a backward and a step"
REFUSED = {
    "sam": WRITES,
    "decayed": WRITES,
    **dict.fromkeys(("noised", "signs", "written", "subtracted", "composed"), CHANGES),
    **dict.fromkeys(("capped", "written_late", "clipped_between"), CHANGES),
    "assigned": "without a backward",
    **dict.fromkeys(("in_turn", "nested"), "two optimizers of the same parameters"),
    "frozen_last": "freezes in an update's last micro-step",
    "thawed_late": "freezes what they belong to during its backward",
    "alternated": "has no forward in the last one of an update",
    "clipped_together": "different rates are clipped together",
}


@pytest.mark.parametrize("version", mostly("3.3.1"))
def test_what_a_script_does_to_gradients_equals_a_large_batch_or_is_refused(
    version: str, tmp_path: Path
) -> None:
    ranks = train(PYTHONS[version], "by_hand.py", tmp_path / "merged", MERGE)
    assert_as_alone([trained for trained, _ in ranks])
    for _, stopped in ranks:
        assert stopped.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert text in stopped[name], name


def test_a_script_that_updates_by_itself_is_told_at_once_that_nothing_is_merged(
    tmp_path: Path,
) -> None:
    for rank in train_as_alone("3.3.1", "own_updates.py", tmp_path, MERGE):
        assert WRITES in rank["stopped"]
    proof = evidence(tmp_path / "ours")
    field = {row["name"]: row for row in proof["fields"]}["gradient_merge"]
    assert field["status"] == "no_effect"
    assert field["reason"] == "no optimizer of Paddle's has stepped"
