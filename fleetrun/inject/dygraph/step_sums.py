"""Sizes the buckets of gradients that Paddle sums when a hybrid-parallel optimizer steps.

There, Paddle sums the gradients of data parallelism in parts of 128 MB. Their size is an argument
of Paddle's own; nothing else about these sums can be chosen.
"""

from __future__ import annotations

import functools
import math
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
_FLEET = "paddle.distributed.fleet"
# By module: what sends gradients itself once the method has prepared it, and how.
_SENDERS = {
    "meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer": (
        ("DygraphShardingOptimizer", "__init__", "one by one or in its buffers"),
        ("DygraphShardingOptimizerV2", "__init__", "in its buffers"),
    ),
    "meta_parallel.sharding.group_sharded_stage2": (
        ("GroupShardedStage2", "__init__", "in each backward"),
    ),
    "meta_parallel.sharding.group_sharded_stage3": (
        ("GroupShardedStage3", "__init__", "in each backward"),
    ),
    "meta_parallel.pipeline_parallel": (
        ("PipelineParallel", "fused_gradient", "in each backward"),
    ),
}
# By a name of Paddle's: how that sends gradients itself.
PADDLES_SUMS: dict[str, str] = {}


def install(must_sync: Callable[[Sequence[Any]], bool] | None, proof: Evidence) -> None:
    """Size Paddle's buckets; note what sends gradients.

    MUST_SYNC says whether a script that averages some gradients itself may do so now.
    """
    after_import(
        f"{_FLEET}.utils.hybrid_parallel_util", lambda module: _size_parts(module, must_sync, proof)
    )
    for name in _SENDERS:
        after_import(f"{_FLEET}.{name}", functools.partial(_note_senders, name))


def _note_senders(name: str, module: ModuleType) -> None:
    for kind, method, how in _SENDERS[name]:
        if hasattr(module, kind):
            note = functools.partial(_note, kind, how)
            watch_method(getattr(module, kind), method, after=note)


def _note(kind: str, how: str, _sender: Any) -> None:
    PADDLES_SUMS[kind] = how


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
        size = settings.effective(_FIELD)
        if size == "auto":
            size = buckets.describe_auto(sum(map(tensors.nbytes, parameters)))[0]
        if size and bucket_size == _PADDLES_BYTES:
            bucket_size = math.ceil(float(size) * buckets.MEBIBYTE)
            if proof.status(_FIELD) is None:
                evidence = "by Paddle's own bucket_size when the optimizer steps"
                proof.field(_FIELD, EFFECTIVE, in_effect=size, evidence=evidence)
        fuse(parameters, group, bucket_size, scale)
