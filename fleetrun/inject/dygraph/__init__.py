"""What the strategy asks of dynamic graphs: our reducer, gradient merge, fused updates, AMP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import paddle_api
from ..import_hooks import after_import
from ..paddle_api import private_names
from . import amp, backward, casts, merge_hooks, multi_tensor
from .data_parallel import REDUCER_FIELDS, Reducers
from .gradient_accumulation import GradientMerge

if TYPE_CHECKING:
    from types import ModuleType

    from ..evidence import Evidence
    from ..spec import StrategySpec


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Patch Paddle for the fields that are asked for."""
    merges = spec.merge_steps > 1 and paddle_api.has(private_names.MERGE)
    if any(name in spec.strategy for name in REDUCER_FIELDS) and paddle_api.has(
        private_names.REDUCER
    ):
        _install_reducers(spec, proof, merges=merges)
    if multi_tensor.is_asked_for(spec) and paddle_api.has(private_names.FUSED):
        multi_tensor.install(proof)
    if amp.is_asked_for(spec) and paddle_api.has(private_names.AMP):
        amp.install(proof)


def _install_reducers(spec: StrategySpec, proof: Evidence, *, merges: bool) -> None:
    merge = GradientMerge(spec, proof)
    reducers = Reducers(spec, proof, merge.must_sync)
    merge.count_calls = reducers.count_calls
    if merges:
        merge_hooks.install(merge, reducers.flush, applies_tail=spec.merge_tail == "step")

    def patch(module: ModuleType) -> None:
        reducers.patch(module)
        from paddle.base import core

        backward.patch(core)

    after_import("paddle.distributed.parallel", patch)
    after_import("paddle.nn.layer.layers", casts.patch)
