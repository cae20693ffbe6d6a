"""Which settings in the sections of `hybrid_configs` this job can use: `mp_configs.sync_grad`."""

from __future__ import annotations

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
_OF_LAYERS = frozenset(key for _, keys in _LAYERS.values() for key in keys)
# How many layers of this training use each.
_counts: Counter[str] = Counter()


def watch() -> None:
    """Count the layers that use the settings of layers."""
    for name in _LAYERS:
        after_import(name, _watch)


def _watch(module: ModuleType) -> None:
    kinds, _ = _LAYERS[module.__name__]
    for kind in kinds:
        if hasattr(module, kind):
            watch_method(getattr(module, kind), "__init__", after=_count)


def _count(layer: Any) -> None:
    _counts.update(key for key in _OF_LAYERS if getattr(layer, key, False) is True)


def obstacle(path: str, degrees: Mapping[str, int], *, is_default: bool) -> str:
    """Return why PATH has no effect in a job with these DEGREES; empty if nothing is known."""
    section, _, key = path.rpartition(".")
    axis = _AXES.get(section, "")
    if axis and degrees.get(f"{axis}_degree", 1) == 1:
        return f"{path} is for a {axis}_degree of 2 or more"
    if key in _OF_LAYERS and not is_default and not _counts[key]:
        return f"no layer uses {path}"
    return ""


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
