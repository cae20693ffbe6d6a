"""fleetrun's reducer in real trainings of two ranks, compared with Paddle's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, assert_as_alone, evidence, in_turns, train, train_as_alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train


MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}}


@pytest.mark.parametrize("version", PYTHONS)
def test_merged_micro_steps_equal_a_large_batch(version: str, tmp_path: Path) -> None:
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4, "avg": True}}
    large = train(PYTHONS[version], "merging.py", tmp_path / "large", None)
    first, second = train(PYTHONS[version], "merging.py", tmp_path / "merged", merge)
    for name, model in first.items():
        assert model["weights"] == second[name]["weights"]
        assert model["weights"] == pytest.approx(large[0][name]["weights"], abs=1e-6)
        assert model["rate"] == large[0][name]["rate"]


@pytest.mark.parametrize("version", PYTHONS)
def test_a_model_with_sparse_gradients_is_left_to_paddles_own_reducer(
    version: str, tmp_path: Path
) -> None:
    fused = {"fuse_grad_size_in_num": 4, "nccl_comm_num": 2}
    plain = train(PYTHONS[version], "parts.py", tmp_path / "plain", None)
    ranks = train(PYTHONS[version], "parts.py", tmp_path / "fused", fused)
    for theirs, ours in zip(plain, ranks, strict=True):
        assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-6)
        assert ours["none"]
    proof = evidence(tmp_path / "fused")
    # Twelve dense gradients, four in each bucket, and a sparse one.
    assert proof["counts"]["allreduces"] == 4
    status = {field["name"]: field["status"] for field in proof["fields"]}
    assert status == {"fuse_grad_size_in_num": "effective", "nccl_comm_num": "no_effect"}


@pytest.mark.parametrize("version", PYTHONS)
def test_what_a_script_does_to_gradients_is_done_once_in_its_order_at_the_update(
    version: str, tmp_path: Path
) -> None:
    ranks = train(PYTHONS[version], "by_hand.py", tmp_path / "merged", MERGE)
    assert_as_alone([trained for trained, _ in ranks])
    for _, stopped in ranks:
        assert "from several backwards" in stopped["composed"]
        assert "without backward" in stopped["assigned"]


@pytest.mark.parametrize("version", PYTHONS)
def test_scripts_that_take_gradients_of_several_weights_for_an_update_are_refused(
    version: str, tmp_path: Path
) -> None:
    ranks = train(PYTHONS[version], "rewritten.py", tmp_path / "merged", MERGE)
    # Weights that are written back stay the same weights.
    assert_as_alone([trained for trained, _ in ranks])
    for _, stopped in ranks:
        assert "has cleared those of an earlier backward" in stopped.pop("composed")
        assert set(stopped) == {"sam", "decayed"}
        for name, text in stopped.items():
            assert "the script writes weights between the backwards of one update" in text, name


# By methods, and by kernels.
@pytest.mark.parametrize(("version", "kernels"), in_turns("", "1"))
def test_a_script_that_updates_by_itself_is_told_at_once_that_nothing_is_merged(
    version: str, kernels: str, tmp_path: Path
) -> None:
    more = {"KERNELS": kernels}
    for rank in train_as_alone(version, "own_updates.py", tmp_path, MERGE, more=more):
        assert "the script updates the weights itself and never calls step" in rank["stopped"]
    proof = evidence(tmp_path / "ours")
    field = {row["name"]: row for row in proof["fields"]}["gradient_merge"]
    assert field["status"] == "no_effect"
    assert field["reason"] == "no optimizer of Paddle's has stepped"


@pytest.mark.parametrize("version", PYTHONS)
def test_models_that_step_at_different_rates_are_merged_each_by_itself(
    version: str, tmp_path: Path
) -> None:
    for report in train_as_alone(version, "rates.py", tmp_path, MERGE):
        assert len(report) == 6
        assert not [model["error"] for model in report.values() if "error" in model]
