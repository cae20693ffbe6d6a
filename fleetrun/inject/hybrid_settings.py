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
# The layers that read settings when they are created, and keep them as attributes.
_LAYERS = {
    "paddle.distributed.fleet.layers.mpu.mp_layers": (
        ("ColumnParallelLinear", "RowParallelLinear"),
        ("mp_async_allreduce", "mp_skip_c_identity", "mp_fused_linear_param_grad_add"),
    ),
    "paddle.distributed.fleet.utils.sequence_parallel_utils": (
        ("ColumnSequenceParallelLinear", "RowSequenceParallelLinear"),
        ("recompute_allgather", "sp_async_reduce_scatter"),
    ),
}
_OF_LAYERS: frozenset[str] = frozenset(key for _, keys in _LAYERS.values() for key in keys)
# Layers read the first only if the second is on.
_ONLY_WITH = {"recompute_allgather": "sp_async_reduce_scatter"}
_PIPELINES = "paddle.distributed.fleet.meta_parallel"
# By module: the only pipelines that send ahead, those with several parts of the model on a rank.
_SEND_AHEAD = {
    f"{_PIPELINES}.pipeline_parallel": "PipelineParallelWithInterleave",
    f"{_PIPELINES}.dualpipev": "DualPipeVParallel",
}
# The number of layers of this training that use each setting.
_counts: Counter[str] = Counter()
# The pipelines of this training that send ahead.
_pipelines: list[Any] = []


def watch() -> None:
    """Count the layers and the pipelines that use settings of their own."""
    for name in _LAYERS:
        after_import(name, _watch)
    for name in _SEND_AHEAD:
        after_import(name, _watch_pipelines)


def _watch(module: ModuleType) -> None:
    kinds, _ = _LAYERS[module.__name__]
    for kind in kinds:
        if hasattr(module, kind):
            watch_method(getattr(module, kind), "__init__", after=_count)


def _count(layer: Any) -> None:
    _counts.update(
        key
        for key in _OF_LAYERS
        if getattr(layer, key, False) and getattr(layer, _ONLY_WITH.get(key, key), False)
    )


def _watch_pipelines(module: ModuleType) -> None:
    kind = getattr(module, _SEND_AHEAD[module.__name__], None)
    if kind is not None:
        watch_method(kind, "__init__", after=lambda model: _pipelines.append(type(model)))


def obstacle(path: str, degrees: Mapping[str, int], *, is_default: bool) -> str:
    """Return why PATH has no effect in a job with these DEGREES; empty if nothing is known."""
    section, _, key = path.rpartition(".")
    axis = _AXES.get(section, "")
    if axis and degrees.get(f"{axis}_degree", 1) == 1:
        return f"{path} needs a {axis}_degree of 2 or more"
    if key in _OF_LAYERS and not is_default and not _counts[key]:
        return f"no layer uses {path}"
    if key == "overlap_p2p_comm" and not is_default and not _pipelines:
        return f"{path} needs a pipeline with virtual stages"
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
    count = _counts[path.rpartition(".")[2]]
    layers = f" ({count} layer{'s' * (count != 1)})" if count else ""
    return f"{path} {used(message, path)}{layers}"
