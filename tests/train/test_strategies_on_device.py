"""Strategies of dynamic graphs on a device that is late, against one process and its witness."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import devices
import pytest
from training import PYTHONS, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

LATE = {"kernel_us": 200, "delay_us": 2000}
FUSED = {"fuse_all_reduce_ops": True, "fuse_grad_size_in_num": 3}
OVERLAPPED = {**FUSED, "nccl_comm_num": 2, "sync_nccl_allreduce": False}
LEVELS = {**FUSED, "use_hierarchical_allreduce": True}
MERGED = {**FUSED, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}}
RECOMMENDED = {
    "fuse_all_reduce_ops": True,
    "fuse_grad_size_in_MB": "auto",
    "nccl_comm_num": 1,
    "sync_nccl_allreduce": False,
    "use_hierarchical_allreduce": "auto",
}
# 7 gradients in buckets of three.
SIZES = 3


@pytest.mark.parametrize(
    ("strategy", "nranks", "hosts", "more"),
    [
        pytest.param(FUSED, 2, 1, {}, id="fused", marks=pytest.mark.long),
        pytest.param(OVERLAPPED, 3, 1, {"UNUSED": "1"}, id="overlapped-unused"),
        pytest.param(LEVELS, 4, 2, {}, id="levels", marks=pytest.mark.long),
        pytest.param(MERGED, 2, 1, {"MICRO_STEPS": "2"}, id="merged", marks=pytest.mark.long),
        pytest.param(
            {**OVERLAPPED, "bf16_allreduce": True}, 2, 1, {}, id="bf16", marks=pytest.mark.long
        ),
        pytest.param(RECOMMENDED, 3, 1, {}, id="recommended"),
    ],
)
def test_strategies_are_right_and_in_effect(
    strategy: dict[str, Any], nranks: int, hosts: int, more: dict[str, str], tmp_path: Path
) -> None:
    folder, witness = tmp_path / "ours", tmp_path / "witness"
    witness.mkdir()
    with devices.on("npu", **LATE, witness=witness):
        ranks = train(
            PYTHONS["3.3.1"], "odd.py", folder, strategy, nranks=nranks, hosts=hosts, more=more
        )
    for rank, report in enumerate(ranks):
        assert report["place"] == f"Place(npu:{rank})"
        exactness = 2e-3 if "bf16_allreduce" in strategy else 2e-6
        assert report["weights"] == pytest.approx(report["alone"], abs=exactness)
        assert report["weights"] == ranks[0]["weights"]
        proof = json.loads((folder / f"strategy.{rank}.json").read_text())
        assert {row["name"]: row["status"] for row in proof["knobs"]} == dict.fromkeys(
            strategy, "effective"
        )
        assert (proof["ranks_equal"], proof["failures"]) == (True, [])
        assert proof["counts"]["gradients_checked"] > 0
