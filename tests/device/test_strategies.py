"""Strategies of dynamic graphs on a slow device, compared with one process and the witness."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import device_strategies
import devices
import pytest
from training import PYTHONS, alone, evidence, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

LATE = {"kernel_us": 200, "delay_us": 5000}
# Longer than a busy machine takes to start a kernel.
LINGER = {"linger_us": 500_000}
PYTHON = PYTHONS["3.3.1"]
# The updates and the gradients of odd.py.
UPDATES, GRADIENTS = 4, 7
# The alignment of gradients in a device's memory, in bytes.
ALIGNMENT = 1024
# The widths of the dtypes in which gradients are summed.
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
# What every run of scripts/test tries, with the numbers of ranks and hosts.
SHORT = [
    ("recommended", 2, 1),
    ("overlapped", 3, 1),
    ("levels", 4, 2),
    ("merged", 2, 1),
    ("one by one", 2, 1),
]


# Prints how two steps end with a table of sparse gradients, and then of dense ones.
TABLE = """
import paddle

def train(is_sparse):
    table = paddle.nn.Embedding(5, 6, sparse=is_sparse)
    optimizer = paddle.optimizer.SGD(0.1, parameters=table.parameters())
    for _ in range(2):
        table(paddle.arange(5)).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return "trained"

try:
    print(train(is_sparse=True))
except RuntimeError as error:
    print(error)
print(train(is_sparse=False))
"""


def test_each_field_that_takes_effect_is_tried() -> None:
    assert {*device_strategies.FIELDS} == device_strategies.effective()
    tried = [device_strategies.TOGETHER[name] for name, _, _ in SHORT]
    asked = {field for document in tried for section in document.values() for field in section}
    assert device_strategies.effective() - asked == {"fuse_grad_size_in_num"} - asked


def _cases() -> list[Any]:
    return [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
        for name in device_strategies.ALL
        for case in [(name, 2, 1), (name, 3, 1), (name, 4, 1), (name, 4, 2)]
    ]


@pytest.mark.parametrize(("name", "nranks", "hosts"), _cases())
def test_a_strategy_is_right_and_in_effect_and_counted_as_by_the_witness(
    name: str, nranks: int, hosts: int, tmp_path: Path
) -> None:
    document = device_strategies.ALL[name]
    asked, builds = (document.get(part, {}) for part in ("strategy", "build_strategy"))
    # The strategy as the launcher resolves it.
    chosen = {"nccl_comm_num": hosts, "hierarchical_allreduce_inter_nranks": nranks // hosts}
    asked = {
        key: chosen[key] if key in chosen and value == "auto" else value
        for key, value in asked.items()
    }
    more = {"MICRO_STEPS": str(device_strategies.merged_steps(document))}
    for field, variable in (("find_unused_parameters", "UNUSED"), ("hybrid_configs", "FLEET")):
        if asked.get(field):
            more[variable] = "1"
    # Paddle's reducer alone averages strided gradients wrongly, so ranks diverge.
    if not device_strategies.sends_gradients(document):
        more["STRAIGHT"] = "1"
    # A rank that read garbage from freed memory once compared no more; the others waited for it.
    frees = {"free": "early"} if name == "recommended" else {}
    more |= {"FLAGS_free_idle_chunk": "1"} if frees else {}
    folder, witness = tmp_path / "ours", tmp_path / "witness"
    witness.mkdir()
    with devices.on("npu", **LATE, **LINGER, **frees, witness=witness):
        ranks = train(
            *(PYTHON, "odd.py", folder, asked),
            nranks=nranks,
            hosts=hosts,
            more=more,
            builds=builds,
        )
    for rank, report in enumerate(ranks):
        assert report["place"] == f"Place(npu:{rank})"
        exactness = 2e-3 if asked.get("bf16_allreduce") else 2e-6
        assert report["weights"] == pytest.approx(report["alone"], abs=exactness)
        assert report["weights"] == ranks[0]["weights"]
        proof = evidence(folder, rank)
        assert {field["name"] for field in proof["fields"]} == {*asked, *builds}
        for field in proof["fields"]:
            if not has_no_effect(field, proof["counts"], nranks):
                is_moot = makes_no_difference(field, proof["counts"])
                assert field["status"] == ("no_difference" if is_moot else "effective"), field
        assert (proof["ranks_equal"], proof["failures"]) == (True, [])
        assert not frees or proof["notes"] == []
        if device_strategies.sends_gradients(document) and not devices.PLUGIN:
            assert_witnessed(proof, devices.witnessed(witness, rank))


def test_sparse_gradients_are_not_merged_where_paddle_crashes(tmp_path: Path) -> None:
    asked = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    with devices.on("npu"):
        _, output = alone("3.3.1", tmp_path, TABLE, {"strategy": asked})
    refused, dense = output.splitlines()[-2:]
    assert "a gradient is sparse: create embeddings with sparse=False" in refused
    assert dense == "trained"


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ({}, {}),
        pytest.param({"sharding": 2}, {"FLAGS_use_stride_kernel": "0"}, marks=pytest.mark.long),
        pytest.param({"sharding": 2, "stage": 3}, {}, marks=pytest.mark.long),
    ],
)
def test_a_script_may_choose_another_default_device_for_a_while(
    layout: dict[str, int], flags: dict[str, str], tmp_path: Path
) -> None:
    asked = device_strategies.TOGETHER["overlapped"]["strategy"]
    seen = tmp_path / "seen"
    seen.mkdir()
    updates = 3 if layout else UPDATES
    verify = {"path": str(seen), "updates": updates, "snapshots": 1, "moves": not layout}
    # Paddle itself cannot clip the gradients of such parameters there.
    more = {"LAYOUT": json.dumps(layout), "CLIP": "0", "UNUSED": "1"}
    if layout:
        alone = {**more, "LAYOUT": "{}"}
        with devices.on(""):
            train(PYTHON, "hybrid.py", tmp_path / "alone", None, nranks=1, more=alone)
        more["ALONE"] = str(tmp_path / "alone" / "report.0")
    more |= {"ELSEWHERE": "1", "FLEETRUN_VERIFY": json.dumps(verify), **flags}
    with devices.on("npu", **LATE):
        script = "hybrid.py" if layout else "odd.py"
        ranks = train(PYTHON, script, tmp_path / "ours", asked, check_ranks=1, more=more)
    for rank, report in enumerate(ranks):
        if layout:
            assert report["apart"] < 2e-6
        else:
            assert report["weights"] == pytest.approx(report["alone"], abs=2e-6)
        proof = evidence(tmp_path / "ours", rank)
        assert (proof["ranks_equal"], proof["failures"]) == (True, [])
        assert "fail" not in " ".join(proof["notes"])
        lines = (seen / f"{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)["update"] for line in lines][-1] == updates


def is_as_built(proof: dict[str, Any]) -> bool:
    """Whether Paddle's own reducer averages, so that PROOF has buckets as they were built."""
    return any("as built" in field["evidence"] for field in proof["fields"])


def makes_no_difference(field: dict[str, Any], counts: dict[str, Any]) -> bool:
    """Whether Paddle alone does what FIELD asks for, since all gradients are in one bucket."""
    match field["name"]:
        case "use_hierarchical_allreduce":
            return field["in_effect"] is False
        case "nccl_comm_num":
            return bool(field["in_effect"] == 1)
        case "sync_nccl_allreduce":
            return bool(counts["allreduces"] == 1)
        case name if name.startswith(("fuse_all_reduce", "fuse_grad")):
            return bool(counts["allreduces"] == counts["allreduces_before"] == 1)
    return False


def has_no_effect(field: dict[str, Any], counts: dict[str, Any], nranks: int) -> bool:
    """Whether FIELD cannot have an effect with NRANKS, or in a dynamic graph."""
    match field["name"]:
        case "use_hierarchical_allreduce":
            return not counts["groups"]
        case "hierarchical_allreduce_inter_nranks":
            return bool(field["asked"] >= nranks) or not counts["groups"]
        case "nccl_comm_num":
            return bool(field["asked"] > counts["allreduces"])
        case name:
            return name in ("fuse_bn_act_ops", "fuse_elewise_add_act_ops")


def assert_witnessed(proof: dict[str, Any], seen: list[devices.Collective]) -> None:
    """Compare the PROOF of the backwards with what a rank's device has SEEN."""
    counts, rank = proof["counts"], seen[0].rank
    sums = [call for call in seen if call.dtype in WIDTHS]
    # The first of two levels, if this rank takes part; two levels may be measured and dropped.
    first = (
        "reduce"
        if any(len(group) > 1 and rank in group for group in counts["groups"])
        else "all_reduce"
    )
    buckets = [call for call in sums if call.operation == first]
    last = buckets[-counts["allreduces"] :]
    for call, nbytes in zip(last, counts["bucket_bytes"], strict=True):
        # With the padding before each gradient.
        assert 0 <= call.bytes * 4 // WIDTHS[call.dtype] - nbytes < ALIGNMENT * GRADIENTS
    assert len({call.group for call in last}) == counts["communicators"]
    assert not [call for call in seen if call.dtype == "int32" and call.order > last[0].order]
    # Paddle's own reducer, which cannot be observed, may overlap.
    if not is_as_built(proof):
        assert any(call.beside for call in buckets) == (counts["early"] > 0)
