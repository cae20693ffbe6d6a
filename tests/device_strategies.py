"""The strategies that are tried on the device under test, for dynamic graphs."""

from __future__ import annotations

from typing import Any

import yaml
from training import ROOT

from fleetrun.strategy import fields, load

Document = dict[str, dict[str, Any]]

# So that there are several buckets.
_SMALL = {"fuse_grad_size_in_num": 3}
_MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}
_LEVELS = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}
PRESETS: dict[str, Document] = {
    name: yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    for name in load.PRESETS
    # These are for static graphs, and for scripts that scale their loss.
    if name not in ("compute_fusion", "amp")
}
_ASKED: dict[str, dict[str, Any]] = {
    "fuse_all_reduce_ops": {"fuse_all_reduce_ops": False},
    "fuse_grad_size_in_MB": {"fuse_grad_size_in_MB": 1},
    "fuse_grad_size_in_num": _SMALL,
    "fuse_grad_size_in_TFLOPS": {"fuse_grad_size_in_TFLOPS": 2},
    "last_comm_group_size_MB": {"last_comm_group_size_MB": 0.0001},
    "nccl_comm_num": {**_SMALL, "nccl_comm_num": 2},
    "sync_nccl_allreduce": {**_SMALL, "nccl_comm_num": 2, "sync_nccl_allreduce": True},
    "use_hierarchical_allreduce": {**_SMALL, **_LEVELS},
    "hierarchical_allreduce_inter_nranks": _LEVELS,
    "bf16_allreduce": {**_SMALL, "bf16_allreduce": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_merge": _MERGED,
    "gradient_merge_configs": {**_SMALL, **_MERGED},
    "hybrid_configs": {**_SMALL, "hybrid_configs": {"dp_degree": -1}},
}
FIELDS: dict[str, Document] = {
    **{name: {"strategy": asked} for name, asked in _ASKED.items()},
    "fuse_all_optimizer_ops": {"build_strategy": {"fuse_all_optimizer_ops": True}},
}
# All of these fields, in as few strategies as possible.
TOGETHER: dict[str, Document] = {
    "recommended": PRESETS["recommended"],
    "overlapped": {
        "strategy": {
            **_SMALL,
            "last_comm_group_size_MB": 0.0001,
            "nccl_comm_num": 2,
            "find_unused_parameters": True,
        },
        "build_strategy": {"fuse_all_optimizer_ops": True},
    },
    "levels": {"strategy": {"fuse_grad_size_in_TFLOPS": 3, **_LEVELS, "bf16_allreduce": True}},
    "merged": {"strategy": {**_SMALL, **_MERGED, "nccl_comm_num": 2, "sync_nccl_allreduce": True}},
    "one by one": {"strategy": {"fuse_all_reduce_ops": False, "hybrid_configs": {"dp_degree": -1}}},
}
ALL = {**PRESETS, **FIELDS, **TOGETHER}


def effective() -> set[str]:
    """Return the fields that take effect in dynamic graphs according to the table."""
    return {
        field.name
        for field in fields.TABLE
        if fields.outcome(field, paddle="3.3.1", graph="dygraph", device="cpu").status
        == fields.EFFECTIVE
    }


def sends_gradients(document: Document) -> bool:
    """Whether DOCUMENT needs fleetrun's own reducer."""
    handed_on = {"find_unused_parameters", "hybrid_configs"}
    return bool(document.get("strategy", {}).keys() - handed_on)


def merged_steps(document: Document) -> int:
    """Return the number of backwards per update with DOCUMENT."""
    asked = document.get("strategy", {})
    return asked["gradient_merge_configs"]["k_steps"] if asked.get("gradient_merge") else 1
