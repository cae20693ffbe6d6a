"""What the strategy asks of dynamic graphs: our reducer, gradient merge, fused updates, AMP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..import_hooks import after_import
from . import amp, backward, merge_hooks, multi_tensor
from .data_parallel import REDUCER_FIELDS, Reducers
from .gradient_accumulation import GradientMerge

if TYPE_CHECKING:
    from types import ModuleType

    from ..evidence import Evidence
    from ..spec import StrategySpec


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Patch Paddle for the fields that are asked for."""
    if any(name in spec.strategy for name in REDUCER_FIELDS):
        _install_reducers(spec, proof)
    multi_tensor.install(spec, proof)
    amp.install(spec, proof)


def _install_reducers(spec: StrategySpec, proof: Evidence) -> None:
    merge = GradientMerge(spec, proof)
    reducers = Reducers(spec, proof, merge.must_sync)
    merge.count_calls = reducers.count_calls
    if spec.merge_steps > 1:
        merge_hooks.install(merge, reducers.flush, applies_tail=spec.merge_tail == "step")

    def patch(module: ModuleType) -> None:
        reducers.patch(module)
        from paddle.base import core

        backward.patch(core)

    after_import("paddle.distributed.parallel", patch)
