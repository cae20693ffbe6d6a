"""Strategies on devices that lack kernels, on all hosts or on one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import devices
import pytest
from training import PROGRAMS, PYTHONS, SITE, ends, evidence, start, told, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

LATE = {"kernel_us": 200, "delay_us": 2000}
PYTHON = PYTHONS["3.3.1"]
FUSED = {"fuse_all_reduce_ops": True, "fuse_grad_size_in_num": 3, "nccl_comm_num": 2}
MERGED = {**FUSED, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}}
# Paddle falls back to the CPU's kernels.
REPLACEABLE = "coalesce_tensor,concat,cast,sum,max,isfinite,stack,arange,view_dtype"


@pytest.mark.parametrize("strides", ["1", "0"])
def test_kernels_that_most_plugins_lack_are_done_without(strides: str, tmp_path: Path) -> None:
    with devices.on("npu", **LATE, without=REPLACEABLE):
        # Vendors' plug-ins set this to 0.
        more = {"FLAGS_use_stride_kernel": strides}
        ranks = train(PYTHON, "odd.py", tmp_path / "ours", FUSED, more=more)
    for rank, report in enumerate(ranks):
        assert report["weights"] == pytest.approx(report["alone"], abs=2e-6)
        proof = evidence(tmp_path / "ours", rank)
        assert {row["status"] for row in proof["knobs"]} == {"effective"}
        assert (proof["ranks_equal"], proof["failures"]) == (True, [])


def test_a_paddle_without_kernels_of_a_plugin_averages_itself(tmp_path: Path) -> None:
    with devices.on("npu", **LATE):
        ranks = train(PYTHONS["2.6.2"], "failing.py", tmp_path / "ours", FUSED)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    reasons = {row["name"]: row for row in evidence(tmp_path / "ours", 0)["knobs"]}
    why = "in this Paddle it is not true that gradients are views of the buffer on npu"
    row = reasons["fuse_grad_size_in_num"]
    own = "Paddle's own reducer averages the gradients"
    assert (row["status"], row["reason"]) == ("no_effect", f"{why}: {own}")


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(FUSED, marks=pytest.mark.long, id="fused"), pytest.param(MERGED, id="merged")],
)
def test_hosts_whose_devices_differ_take_what_all_of_them_can(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    asked = told({"strategy": strategy, "topology": {"nranks": 2, "nnodes": 2}})
    (tmp_path / "strategy.json").write_text(json.dumps(asked))

    def of_rank(rank: int) -> dict[str, str]:
        folder = tmp_path / f"host{rank}"
        folder.mkdir()
        # Without this kernel no gradient can be written in place. Warm ranks would all have it.
        without = {"TESTDEVICE_WITHOUT": "scale", "PYTHONPATH": str(SITE)} if rank else {}
        return {"FLEETRUN_RECORDS": str(folder / "rank.0.jsonl"), **without}

    with devices.on("npu", **LATE):
        ranks = start(
            PYTHON,
            [PROGRAMS, "training"],
            tmp_path,
            2,
            of_rank,
            FLEETRUN_STRATEGY_FILE=str(tmp_path / "strategy.json"),
            OUTPUT=str(tmp_path / "report"),
        )
        codes, outputs = ends(ranks, tmp_path)
    assert codes == [0, 0], outputs
    reports = [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(2)]
    assert reports[0]["weights"] == reports[1]["weights"]
    for rank, by in enumerate((" of rank 1", "")):
        proof = evidence(tmp_path / f"host{rank}")
        assert {row["status"] for row in proof["knobs"]} == {"no_effect"}
        why = f"it is not true that gradients are views of the buffer on npu{by}"
        reasons = {row["reason"].partition(": ")[0] for row in proof["knobs"]}
        assert reasons - {"as gradient_merge"} == {f"in this Paddle {why}"}
        (note,) = [note for note in proof["notes"] if f"{why}: Paddle's own reducer" in note]
        assert note.startswith("Paddle 3.3.1 lacks something here that fleetrun needs. ")
