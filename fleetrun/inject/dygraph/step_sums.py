"""Sizes the buckets of gradients that Paddle sums when a hybrid-parallel optimizer steps.

There, Paddle sums the gradients of data parallelism in parts of 128 MB. Their size, and that of the
buffers of sharding, are arguments of Paddle's own; nothing else about these sums can be chosen.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Any

from .. import buckets, settings
from ..evidence import EFFECTIVE
from ..import_hooks import after_import, in_place_of, watch_method
from ..paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType

    from ..evidence import Evidence

# Paddle's limit of a bucket.
_PADDLES_BYTES = 128 * buckets.MEBIBYTE
_FIELD = "fuse_grad_size_in_MB"
_UTILITIES = "paddle.distributed.fleet.utils.hybrid_parallel_util"
_SHARDING = "paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer"
# The settings with which sharding stage 1 uses buffers, and the setting of a buffer's size.
_FUSED = ("comm_overlap", "tensor_fusion")
_BUFFERS = "comm_buffer_size_MB"
# By a name of Paddle's: how that sends gradients itself.
PADDLES_SUMS: dict[str, str] = {}


def install(must_sync: Callable[[Sequence[Any]], bool] | None, proof: Evidence) -> None:
    """Size Paddle's buckets; note what sends gradients.

    MUST_SYNC says whether a script that averages some gradients itself may do so now.
    """
    after_import(_UTILITIES, lambda module: _size_parts(module, must_sync, proof))
    after_import(_SHARDING, lambda module: _size_buffers(module, proof))
    parallel = "paddle.distributed.fleet.meta_parallel"
    for place, name, method in (
        ("sharding.group_sharded_stage2", "GroupShardedStage2", "__init__"),
        ("sharding.group_sharded_stage3", "GroupShardedStage3", "__init__"),
        ("pipeline_parallel", "PipelineParallel", "fused_gradient"),
    ):
        after_import(f"{parallel}.{place}", functools.partial(_note_sums, name, method))


def _note_sums(name: str, method: str, module: ModuleType) -> None:
    """Note that the class NAME sends gradients itself once its METHOD has prepared it."""

    def note(_model: Any) -> None:
        PADDLES_SUMS[name] = "in each backward"

    watch_method(getattr(module, name), method, after=note)


def _size_parts(
    module: ModuleType, must_sync: Callable[[Sequence[Any]], bool] | None, proof: Evidence
) -> None:
    @in_place_of(module, "fused_allreduce_gradients_with_group")
    def fused_allreduce_gradients_with_group(
        fuse: Callable[..., None],
        parameter_list: Iterable[Any],
        group: Any,
        bucket_size: int = _PADDLES_BYTES,
        scale: float | None = None,
    ) -> None:
        parameters = list(parameter_list)
        if must_sync is not None and not must_sync(parameters):
            return
        PADDLES_SUMS["Paddle"] = f"when the optimizer steps, where {_FIELD} alone has an effect"
        nbytes = _limit_bytes(parameters)
        if nbytes and bucket_size == _PADDLES_BYTES:
            bucket_size = nbytes
            _report(proof, nbytes / buckets.MEBIBYTE, "bucket_size when the optimizer steps")
        fuse(parameters, group, bucket_size, scale)


def _size_buffers(module: ModuleType, proof: Evidence) -> None:
    """Give the buffers of sharding optimizers the limit of a bucket."""
    for name in ("DygraphShardingOptimizer", "DygraphShardingOptimizerV2"):
        kind: Any = getattr(module, name, None)
        if kind is not None:
            in_place_of(kind, "__init__")(functools.partial(_init_sized, name, proof))


def _init_sized(
    name: str, proof: Evidence, init: Callable[..., None], self: Any, optimizer: Any, *more: Any
) -> None:
    fleet: Any = sys.modules["paddle.distributed.fleet"]
    # Fleet's own copy of the script's strategy.
    configs = fleet.fleet._user_defined_strategy.strategy.hybrid_configs.sharding_configs
    has_buffers = name.endswith("V2") or any(getattr(configs, field) for field in _FUSED)
    has_field = has_buffers and _BUFFERS in configs.DESCRIPTOR.fields_by_name
    nbytes = _limit_bytes(optimizer._parameter_list) if has_field else 0
    size = 0 if has_field and configs.HasField(_BUFFERS) else math.ceil(nbytes / buckets.MEBIBYTE)
    if size:
        setattr(configs, _BUFFERS, size)
    init(self, optimizer, *more)
    where = f"in buffers of sharding_configs.{_BUFFERS}" if has_field else "in buffers"
    PADDLES_SUMS[name] = where if has_buffers else "one by one"
    if size:
        _report(proof, size, f"sharding_configs.{_BUFFERS} ({name})")


def _limit_bytes(parameters: Iterable[Any]) -> int:
    """Return the requested limit of a bucket of PARAMETERS, in bytes; 0 if there is none."""
    size = settings.effective(_FIELD)
    if size == "auto":
        return math.ceil(buckets.auto_limit_bytes(sum(map(tensors.nbytes, parameters))))
    return math.ceil(float(size or 0) * buckets.MEBIBYTE)


def _report(proof: Evidence, size: float, argument: str) -> None:
    if proof.status(_FIELD) is None:
        proof.field(_FIELD, EFFECTIVE, in_effect=size, evidence=f"by Paddle's own {argument}")
