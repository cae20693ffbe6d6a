"""Implements the strategy in dynamic graphs: reducer, gradient merge, fused updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import paddle_api, settings
from ..import_hooks import after_import
from ..paddle_api import private_names
from . import backward, fused_buffers, merge_hooks, multi_tensor, step_sums
from .data_parallel import REDUCER_FIELDS, Reducers
from .merge import GradientMerge

if TYPE_CHECKING:
    from ..evidence import Evidence
    from ..spec import StrategySpec


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Patch Paddle for the requested fields."""
    fused_buffers.install()
    if any(name in spec.strategy for name in REDUCER_FIELDS):
        merges = settings.merging()[0] > 1 and paddle_api.has(private_names.MERGE)
        if paddle_api.has(private_names.REDUCER):
            must_sync = on_forward = None
            if merges:
                merge = GradientMerge(spec, proof)
                merge_hooks.install(merge)
                must_sync, on_forward = merge.must_sync, merge.on_forward
            reducers = Reducers(spec, proof, on_forward)
            after_import("paddle.distributed.parallel", reducers.patch)
            step_sums.install(must_sync, proof)
            after_import("paddle.base.core", backward.patch)
    if spec.builds(multi_tensor.FIELD) and paddle_api.has(private_names.FUSED):
        multi_tensor.install(proof)
