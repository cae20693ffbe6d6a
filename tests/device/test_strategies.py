"""Strategies on the device under test: weights of one CPU process, counts of its witness."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import devices
import pytest
import train_kinds
import yaml
from train_kinds import launch
from training import PYTHONS, ROOT, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

LATE = {"kernel_us": 300, "delay_us": 2000}
PYTHON = PYTHONS["3.3.1"]
# Of each of the four layers of order.py, in bytes.
LAYERS = [4 * one for one in (4 * 6 + 6, 6 * 8 + 8, 8 * 2 + 2, 3 * 5 + 5)]
# What each run of scripts/test trains here; --long trains every kind.
FEW = ["in_turns", "recurrent", "experts", "uneven", "ordered", "heads"]
ONCE_EACH = {
    "fuse_grad_size_in_num": 2,
    "last_comm_group_size_MB": 0.0001,
    "nccl_comm_num": 2,
    "sync_nccl_allreduce": True,
}
STRATEGIES = {
    **{
        name: (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
        for name in ("recommended", "comm_fusion", "overlap", "gradient_merge")
    },
    "several buckets": yaml.safe_dump({"strategy": ONCE_EACH}),
    "one gradient each": yaml.safe_dump({"strategy": {"fuse_all_reduce_ops": False}}),
    "bytes": yaml.safe_dump({"strategy": {"fuse_grad_size_in_MB": 1}}),
}
# What Paddle itself gets wrong on a plug-in: it adds a strided gradient to one that is not by
# their bare memory, and adds sparse ones by a function for the CPU, which crashes.
NOT_ON_PLUGINS = {"lora", "padded"}
# What a script does several times in an update, or by itself with gradients, is something else when
# updates are merged behind its back.
NOT_MERGED = {
    *("alternating", "critic", "early", "skipped", "by_hand", "minimized", "sharpness"),
    *("projected", "plateau", "smoothed", "reloaded", "in_one_vector", "thinned", "unscaled"),
    *("tried_again", "replaced_at_the_end", "mixed", "late_adam", "sizes_of_its_own"),
}


def sent(folder: Path, nranks: int) -> list[list[tuple[str, int]]]:
    """Return what each of NRANKS ranks has sent: operations and bytes, group by group."""
    ranks = []
    for rank in range(nranks):
        seen = sorted(devices.witnessed(folder, rank), key=lambda one: (one.group, one.order))
        ranks.append([(one.operation, one.bytes) for one in seen])
    return ranks


def test_counts_are_those_of_the_witness(tmp_path: Path) -> None:
    asked = {"fuse_grad_size_in_num": 2, "sync_nccl_allreduce": True}
    with devices.on("npu", **LATE, witness=tmp_path):
        ranks = train(PYTHON, "order.py", tmp_path / "ours", asked)
    for rank, found in enumerate(ranks):
        assert found["weights"] == pytest.approx(found["alone"], abs=1e-6)
        seen = devices.witnessed(tmp_path, rank)
        proof = json.loads((tmp_path / "ours" / f"strategy.{rank}.json").read_text())
        counts = proof["counts"]
        assert sorted(counts["bucket_bytes"]) == sorted(LAYERS)
        # Each of the steps; the device's alignment makes more of their bytes.
        buckets = [one for one in seen if one.operation == "all_reduce" and one.bytes > max(LAYERS)]
        assert len(buckets) == counts["allreduces"] * 4
    first, second = sent(tmp_path, 2)
    assert first == second


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Any]:
    """Train all kinds in one process on the CPU, which knows nothing of a strategy."""
    chosen = train_kinds.names() if pytestconfig.getoption("--long") else FEW
    chosen = [name for name in chosen if name not in NOT_ON_PLUGINS]
    words = ("--kinds=own", f"--alone={','.join(chosen)}")
    return launch(PYTHON, tmp_path_factory.mktemp("alone"), *words, nranks=1).reports[0]


def _cases() -> list[Any]:
    few = [("recommended", 2), ("overlap", 2), ("gradient_merge", 2), ("several buckets", 4)]
    # The batches of the kinds have eight rows, so three ranks cannot have the same of them.
    return [
        pytest.param(name, nranks, marks=() if (name, nranks) in few else pytest.mark.long)
        for name in STRATEGIES
        for nranks in (2, 4)
    ]


@pytest.mark.parametrize(("strategy", "nranks"), _cases())
def test_kinds_of_models_are_trained_as_by_one_cpu_process(
    alone: dict[str, Any], strategy: str, nranks: int, tmp_path: Path
) -> None:
    merges = strategy == "gradient_merge"
    names = [name.removeprefix("alone ") for name in alone if name.startswith("alone ")]
    chosen = [name for name in names if not (merges and name in NOT_MERGED)]
    if nranks > 2:
        # These are for two ranks.
        chosen = [name for name in chosen if name not in {"in_turns", "each_rank"}]
    with devices.on("npu", **LATE, witness=tmp_path):
        ranks = launch(
            *(PYTHON, tmp_path, f"--kinds={','.join(chosen)}"),
            strategy=STRATEGIES[strategy],
            nranks=nranks,
            accumulate=1 if merges else 4,
            is_strict=False,
        ).reports
    train_kinds.assert_as_alone(alone, ranks, chosen)
    traces = sent(tmp_path, nranks)
    assert traces == [traces[0]] * nranks


def test_a_sum_that_is_wrong_on_one_rank_is_noticed(tmp_path: Path) -> None:
    # The first eight collectives hand the parameters out; the next ones are the first buckets.
    asked = {"fuse_grad_size_in_num": 2}
    with (
        devices.on("npu", fault="wrong@9:1"),
        pytest.raises(AssertionError, match="has not given the average"),
    ):
        train(PYTHON, "order.py", tmp_path / "ours", asked, check_ranks=1)
