"""Sizes the buckets of gradients that Paddle sums when a hybrid-parallel optimizer steps.

There, Paddle sums the gradients of data parallelism in parts of 128 MB. Their size is an argument
of Paddle's own; nothing else about these sums can be chosen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .. import buckets, settings
from ..evidence import EFFECTIVE
from ..import_hooks import after_import, in_place_of
from ..paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

    from ..evidence import Evidence

# Paddle's limit of a bucket.
_PADDLES_BYTES = 128 * buckets.MEBIBYTE
_MODULE = "paddle.distributed.fleet.utils.hybrid_parallel_util"
_FIELD = "fuse_grad_size_in_MB"


def install(must_sync: Callable[[set[int]], bool] | None, proof: Evidence) -> None:
    """Size Paddle's buckets.

    MUST_SYNC says whether a script that averages gradients itself may do so now, by the ids of
    their parameters.
    """
    after_import(_MODULE, lambda module: _size_parts(module, must_sync, proof))


def _size_parts(
    module: ModuleType, must_sync: Callable[[set[int]], bool] | None, proof: Evidence
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
        if must_sync is not None and not must_sync(set(map(id, parameters))):
            return
        size = settings.effective(_FIELD)
        if size == "auto":
            size = buckets.auto_limit_mb(sum(map(tensors.nbytes, parameters)))
        if size and bucket_size == _PADDLES_BYTES:
            bucket_size = math.ceil(float(size) * buckets.MEBIBYTE)
            if proof.status(_FIELD) is None:
                evidence = "by Paddle's own bucket_size when the optimizer steps"
                proof.field(_FIELD, EFFECTIVE, in_effect=size, evidence=evidence)
        fuse(parameters, group, bucket_size, scale)
