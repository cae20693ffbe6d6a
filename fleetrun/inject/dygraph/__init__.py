"""What the strategy asks for in dynamic graphs: our own reducer of gradients, and their merging."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..imports import after_import
from . import backward, merging
from .data_parallel import BUCKETED, Models
from .merge import Rounds

if TYPE_CHECKING:
    from types import ModuleType

    from ..evidence import Evidence
    from ..wish import Wish


def install(asked: Wish, proof: Evidence) -> None:
    """Put our reducer into Paddle if anything is asked for that needs it."""
    if not any(name in asked.strategy for name in BUCKETED):
        return
    rounds = Rounds(asked, proof)
    models = Models(asked, proof, rounds.must_sync)
    rounds.count_calls = models.count_calls
    if asked.merge_steps > 1:
        merging.install(rounds, models.flush, steps_tail=asked.merge_tail == "step")

    def patch(module: ModuleType) -> None:
        models.patch(module)
        from paddle.base import core

        backward.watch(core)

    after_import("paddle.distributed.parallel", patch)
