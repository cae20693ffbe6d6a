"""Hybrid layouts: each rank's updates are seen, and copies of parameters are compared."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import devices
import pytest
from training import PYTHONS, ROOT, run, train

from fleetrun.rundir import rankfile

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

GOES_ON = ": Paddle alone sums its gradients, as without fleetrun, so the job goes on"
# Per kind of device: the layouts that Paddle has there; for each, the parameter that one rank
# changes, how many ranks hold copies of it, and which ranks are said to differ ("": none).
CPU = {
    2: {
        "mp=2!1:0.norm.weight": (2, "rank 1 (mp 1) and rank 0 (mp 0) differ"),
        # Each rank has its own part of this parameter.
        "mp=2!1:0.up.weight": (2, ""),
        "sharding=2!1:1.up.bias": (2, "rank 1 (sharding 1) and rank 0 (sharding 0) differ"),
        "sep=2!1:1.up.bias": (2, "rank 1 (sep 1) and rank 0 (sep 0) differ"),
        "dp=2!1:1.up.bias": (2, "rank 1 and rank 0 differ"),
    },
    4: {
        "dp=2,mp=2!3:0.norm.weight": (4, "rank 3 (dp 1, mp 1) differs from rank 0 (dp 0, mp 0)"),
        "dp=2,mp=2!3:0.up.weight": (4, "rank 3 (dp 1, mp 1) and rank 1 (dp 0, mp 1) differ"),
        "dp=2,sharding=2!0:1.up.bias": (
            4,
            "rank 0 (dp 0, sharding 0) differs from rank 1 (dp 0, sharding 1)",
        ),
        "dp=2,sep=2!1:1.up.bias": (4, "rank 1 (dp 0, sep 1) differs from rank 0 (dp 0, sep 0)"),
    },
}
NPU = {
    2: {
        "sharding=2:stage 2!1:1.up.bias": (2, "rank 1 (sharding 1) and rank 0 (sharding 0) differ"),
        "sharding=2:stage 3 offload": (2, ""),
        # Small parameters are not split.
        "sharding=2:stage 3!1:1.down.bias": (
            2,
            "rank 1 (sharding 1) and rank 0 (sharding 0) differ",
        ),
        "sharding=2:stage 3!1:1.down.weight": (2, ""),
    },
    4: {
        "dp=2,pp=2!3:norm.weight": (2, "rank 3 (dp 1, pp 1) and rank 1 (dp 0, pp 1) differ"),
        "mp=2,pp=2!1:norm.weight": (2, "rank 1 (mp 1, pp 0) and rank 0 (mp 0, pp 0) differ"),
        "dp=2,sharding=2:stage 3!3:1.down.weight": (
            4,
            "rank 3 (dp 1, sharding 1) and rank 1 (dp 0, sharding 1) differ",
        ),
    },
    8: {
        "dp=2,mp=2,pp=2!7:up.weight": (
            4,
            "rank 7 (dp 1, mp 1, pp 1) and rank 3 (dp 0, mp 1, pp 1) differ",
        ),
        "dp=2,sharding=2,mp=2": (8, ""),
    },
}


def hooked(way: str) -> str:
    """Return the function of Paddle at whose end an update is complete."""
    if "stage 3" in way:
        return "GroupShardedStage3._redefine_opt_step._opt_step"
    return (
        "GroupShardedOptimizerStage2.step" if "stage 2" in way else "HybridParallelOptimizer.step"
    )


def cases() -> list[Any]:
    rows = [(kind, n, "3.3.1") for kind, table in (("", CPU), ("npu", NPU)) for n in table]
    rows += [("", n, "2.6.2") for n in CPU]
    # How ranks are compared depends on no version.
    is_long = [n == 8 or version == "2.6.2" for _, n, version in rows]
    return [
        pytest.param(*row, marks=pytest.mark.long if long else ())
        for row, long in zip(rows, is_long, strict=True)
    ]


@pytest.mark.parametrize(("kind", "nranks", "version"), cases())
def test_copies_are_compared_and_a_rank_that_differs_is_named(
    kind: str, nranks: int, version: str, tmp_path: Path
) -> None:
    table = (NPU if kind else CPU)[nranks]
    with devices.on(kind, count=max(nranks, 4)):
        reports = train(
            *(PYTHONS[version], "layouts.py", tmp_path / "ours", {}),
            nranks=nranks,
            check_ranks="auto",
            more={"WAYS": ";".join(table)},
        )
    for way, (copies, differ) in table.items():
        rows = [report[way] for report in reports]
        assert [(row["updates"], row["ranks"]) for row in rows] == [(4, copies)] * nranks, way
        assert [row["hooked"] for row in rows] == [[hooked(way)]] * nranks, way
        remarks = {note for row in rows for note in row["notes"]}
        if not differ:
            assert remarks == set(), way
            assert [row["equal"] for row in rows] == [True] * nranks, way
            continue
        # What differs makes other parameters differ in later updates.
        remarks = {note for note in remarks if not note.startswith("after update 4 ")}
        name = way.rpartition(":")[2]
        assert any(note.startswith(f"after update 2 {differ} in the") for note in remarks), remarks
        assert all(f"{name} of shape" in note and note.endswith(GOES_ON) for note in remarks), (
            remarks
        )
        assert [row["equal"] for row in rows] == [bool(not row["notes"]) for row in rows], way
    # No failure is left for the next layout.
    proof = rankfile.evidence(str(tmp_path / "ours"), "0")
    assert proof is not None
    assert proof["failures"] == []


def test_updates_of_auto_parallel_are_seen(tmp_path: Path) -> None:
    # Paddle 2.6 refuses it on CPUs.
    (tmp_path / "train.py").write_text(AUTO)
    options = ["--nproc_per_node=2", "--hang_timeout=60s", "--check_ranks=auto"]
    done = run(PYTHONS["3.3.1"], ["-m", "fleetrun", *options, "train.py"], tmp_path)
    assert re.search(r"Done after .* and 3 steps", done.stdout), done.stdout
    assert "the ranks were not compared: there is no data-parallel model" in done.stdout


AUTO = """
import paddle
import paddle.distributed as dist
dist.init_parallel_env()
mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
def place(name, layer, mesh):
    for key, parameter in [*layer._parameters.items()]:
        cut = dist.Shard(1) if (name, key) == ("0", "weight") else dist.Replicate()
        layer._parameters[key] = dist.shard_tensor(parameter, mesh, [cut])
paddle.seed(1)
net = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 2))
net = dist.shard_layer(net, mesh, place)
optimizer = dist.shard_optimizer(paddle.optimizer.AdamW(0.01, parameters=net.parameters()))
for _ in range(3):
    x = dist.shard_tensor(paddle.ones([4, 4]), mesh, [dist.Replicate()])
    (net(x) ** 2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
"""
SCRIPT = """
import sys, time
import paddle
from paddle.distributed import fleet
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2}
fleet.init(is_collective=True, strategy=strategy)
net = paddle.nn.Linear(4, 4)
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
for _ in range(6):
    net(paddle.ones([2, 4])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    time.sleep(0.02)
if paddle.distributed.get_rank() == 1:
    if sys.argv[1] == "plain":
        raise ValueError("a bad batch")
    time.sleep(1000)
group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
paddle.distributed.barrier(group=group)
"""


@pytest.mark.parametrize(
    ("version", "end"),
    [("2.6.2", "plain"), ("3.3.1", "hang")],
)
def test_ranks_are_named_with_their_coordinates(version: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    # Without options nothing counts the steps.
    is_plain = end == "plain"
    options = [] if is_plain else ["--hang_timeout=8s", "--check_ranks=-1"]
    words = ["-m", "fleetrun", "--nproc_per_node=2", *options, "train.py"]
    done = run(PYTHONS[version], [*words, end], tmp_path, PYTHONPATH=str(ROOT))
    sentences = {
        "plain": "fleetrun: rank 1 (mp 1) exited with 1.",
        "hang": "Rank 1 stands in <module> (train.py:",
    }
    assert sentences[end] in done.stdout, done.stdout
    # The last heartbeat was written even if a signal ended the rank.
    assert is_plain or re.search(r"Failed after .* and 6 steps", done.stdout), done.stdout
    assert "this is rank 1 (mp 1)" in (tmp_path / "log" / "workerlog.1").read_text()
    shown = run(PYTHONS[version], ["-m", "fleetrun", "top", "--once"], tmp_path).stdout
    assert re.search(r"(?m)^ +1 +\w+( \d+)? +mp 1 ", shown), shown
    # The report's page names it, too.
    run(PYTHONS[version], ["-m", "fleetrun", "report"], tmp_path)
    page = tmp_path / "log" / "latest" / "report.html"
    assert "rank 1 (mp 1)" in page.read_text(encoding="utf-8")
