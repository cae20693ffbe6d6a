"""Strategies on devices that lack kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import devices
import pytest
from training import PYTHONS, evidence, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

LATE = {"kernel_us": 200, "delay_us": 2000}
PYTHON = PYTHONS["3.3.1"]
FUSED = {"fuse_all_reduce_ops": True, "fuse_grad_size_in_num": 3, "nccl_comm_num": 2}
# Paddle falls back to the CPU's kernels.
REPLACEABLE = "coalesce_tensor,concat,cast,sum,max,isfinite,stack,arange,view_dtype"


def test_kernels_that_most_plugins_lack_are_done_without(tmp_path: Path) -> None:
    with devices.on("npu", **LATE, without=REPLACEABLE):
        # As vendors' plug-ins set it.
        more = {"FLAGS_use_stride_kernel": "0"}
        ranks = train(PYTHON, "odd.py", tmp_path / "ours", FUSED, more=more)
    for rank, report in enumerate(ranks):
        assert report["weights"] == pytest.approx(report["alone"], abs=2e-6)
        proof = evidence(tmp_path / "ours", rank)
        assert {row["status"] for row in proof["fields"]} == {"effective"}
        assert (proof["ranks_equal"], proof["failures"]) == (True, [])


def test_paddle_2_trains_without_what_a_plugin_lacks(tmp_path: Path) -> None:
    with devices.on("npu", **LATE):
        ranks = train(PYTHONS["2.6.2"], "odd.py", tmp_path / "ours", FUSED)
    for report in ranks:
        assert report["weights"] == pytest.approx(report["alone"], abs=2e-6)
