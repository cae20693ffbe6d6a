"""What the strategy asks for in dynamic graphs: our own reducer of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..imports import after_import
from . import backward
from .data_parallel import BUCKETED, Models

if TYPE_CHECKING:
    from types import ModuleType

    from ..evidence import Evidence
    from ..wish import Wish


def install(asked: Wish, proof: Evidence) -> None:
    """Put our reducer into Paddle if anything is asked for that needs it."""
    if not any(name in asked.strategy for name in BUCKETED):
        return
    models = Models(asked, proof, lambda _parameters: True)

    def patch(module: ModuleType) -> None:
        models.patch(module)
        from paddle.base import core

        backward.watch(core)

    after_import("paddle.distributed.parallel", patch)
