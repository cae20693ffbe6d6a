"""Implements the strategy in dynamic graphs: reducer, gradient merge, fused updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import hybrid_settings, paddle_api
from ..import_hooks import after_import
from ..paddle_api import private_names
from . import backward, fused_buffers, merge_hooks, multi_tensor, step_sums
from .data_parallel import REDUCER_FIELDS, Reducers
from .merge import GradientMerge

if TYPE_CHECKING:
    from ..evidence import Evidence
    from ..spec import StrategySpec

_DISTRIBUTED = "paddle.distributed"


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Patch Paddle for the requested fields."""
    fused_buffers.install()
    hybrid_settings.watch()
    if any(name in spec.strategy for name in REDUCER_FIELDS):
        merge = GradientMerge(spec, proof)
        merges = spec.merge_steps > 1 and paddle_api.has(private_names.MERGE)
        if paddle_api.has(private_names.REDUCER):
            _install_reducers(spec, proof, merge, merges=merges)
    if spec.builds(multi_tensor.FIELD) and paddle_api.has(private_names.FUSED):
        multi_tensor.install(proof)
    if paddle_api.has(private_names.BACKWARD):
        _backwards.append(_BackwardCount(proof))
        after_import("paddle.base.core", backward.patch)
        backward.listen(_backwards[0])


class _BackwardCount:
    """Counts backwards until an update is seen: a script may train without Paddle's optimizers."""

    def __init__(self, proof: Evidence) -> None:
        self._proof = proof

    def begin(self) -> None:
        """Do nothing."""

    # A backward that has raised counts, too.
    abandon = begin

    def finish(self) -> None:
        """Count a backward."""
        if self._proof.updates:
            backward.ignore(self)
        self._proof.backwards += 1


# `backward` does not hold it.
_backwards: list[_BackwardCount] = []


def _install_reducers(
    spec: StrategySpec, proof: Evidence, merge: GradientMerge, *, merges: bool
) -> None:
    """Patch the code that averages gradients: if MERGES, as MERGE says."""
    must_sync = merge.must_sync if merges else None
    reducers = Reducers(spec, proof, must_sync)
    if merges:
        merge_hooks.install(merge)
    after_import(f"{_DISTRIBUTED}.parallel", reducers.patch)
    step_sums.install(must_sync, proof)
    after_import("paddle.base.core", backward.patch)
