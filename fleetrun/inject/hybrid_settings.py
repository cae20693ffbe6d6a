"""Determines which nested settings of `hybrid_configs` (`mp_configs.sync_grad`) a job can use."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from .import_hooks import after_import, watch_method

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

# The axis without which Paddle does not read a section.
_AXES = {"mp_configs": "mp", "pp_configs": "pp", "sharding_configs": "sharding"}
_PIPELINES = "paddle.distributed.fleet.meta_parallel"
_AHEAD = "overlap_p2p_comm"
# By module: classes that read settings when they are created. Layers keep them as attributes. Of
# pipelines only those with several parts of the model on a rank send ahead.
_READERS = {
    "paddle.distributed.fleet.layers.mpu.mp_layers": (
        ("ColumnParallelLinear", "RowParallelLinear"),
        ("mp_async_allreduce", "mp_skip_c_identity", "mp_fused_linear_param_grad_add"),
    ),
    "paddle.distributed.fleet.utils.sequence_parallel_utils": (
        ("ColumnSequenceParallelLinear", "RowSequenceParallelLinear"),
        ("recompute_allgather", "sp_async_reduce_scatter"),
    ),
    f"{_PIPELINES}.pipeline_parallel": (("PipelineParallelWithInterleave",), (_AHEAD,)),
    f"{_PIPELINES}.dualpipev": (("DualPipeVParallel",), (_AHEAD,)),
}
_READ: frozenset[str] = frozenset(key for _, keys in _READERS.values() for key in keys)
# Layers read the first only if the second is on.
_ONLY_WITH = {"recompute_allgather": "sp_async_reduce_scatter"}
# How many objects of this training use each setting.
_counts: Counter[str] = Counter()


def watch() -> None:
    """Count the layers and the pipelines that use settings of their own."""
    for name in _READERS:
        after_import(name, _watch)


def _watch(module: ModuleType) -> None:
    kinds, keys = _READERS[module.__name__]

    def count(made: Any) -> None:
        _counts.update(
            key
            for key in keys
            if key == _AHEAD
            or (getattr(made, key, False) and getattr(made, _ONLY_WITH.get(key, key), False))
        )

    for kind in kinds:
        if hasattr(module, kind):
            watch_method(getattr(module, kind), "__init__", after=count)


def obstacle(path: str, degrees: Mapping[str, int], *, is_default: bool) -> str:
    """Return why PATH has no effect in a job with these DEGREES; empty if nothing is known."""
    section, _, key = path.rpartition(".")
    axis = _AXES.get(section, "")
    if axis and degrees.get(f"{axis}_degree", 1) == 1:
        return f"{path} needs a {axis}_degree of 2 or more"
    if key in _READ and not is_default and not _counts[key]:
        needs = "a pipeline with virtual stages" if key == _AHEAD else "a layer that uses it"
        return f"{path} needs {needs}"
    if key == "use_reduce_avg" and not is_default and not _can_average():
        return f"{path} needs NCCL"
    return ""


def _can_average() -> bool:
    """Whether a collective of this Paddle can average; without the function it cannot."""
    # The package has a function of the module's name.
    module = importlib.import_module("paddle.distributed.communication.reduce")
    is_supported = getattr(module, "is_avg_reduce_op_supported", bool)
    return bool(is_supported())


def used(message: Any, path: str) -> Any:
    """Return the value at PATH in MESSAGE; None if there is no such setting."""
    for name in path.split("."):
        message = getattr(message, name, None)
    return message


def described(message: Any, path: str) -> str:
    """Return PATH with the value that Paddle uses, and how many layers do."""
    key = path.rpartition(".")[2]
    count = 0 if key == _AHEAD else _counts[key]
    layers = f" ({count} layer{'s' * (count != 1)})" if count else ""
    return f"{path} {used(message, path)}{layers}"
