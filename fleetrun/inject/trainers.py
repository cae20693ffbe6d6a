"""Finds what the Trainers of PaddleNLP and PaddleFormers do themselves; strategies leave it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import border, settings
from .import_hooks import after_import, watch_method

if TYPE_CHECKING:
    from .evidence import Evidence
    from .spec import StrategySpec

_TRAINERS = ("paddlenlp.trainer.trainer", "paddleformers.trainer.trainer")
# By field: the arguments of a Trainer that do the same.
_ARGUMENTS = {
    "gradient_merge": ("gradient_accumulation_steps",),
    "amp": ("bf16", "fp16"),
    "sharding": ("sharding",),
    "recompute": ("recompute", "recompute_granularity"),
}


def install(_spec: StrategySpec, _proof: Evidence) -> None:
    """Read the arguments of a Trainer when it begins to train."""
    for name in _TRAINERS:
        after_import(name, lambda module: watch_method(module.Trainer, "train", before=_read))


@border.watching("what the Trainer does itself")
def _read(trainer: Any) -> None:
    for field, arguments in _ARGUMENTS.items():
        for name in arguments:
            value = getattr(trainer.args, name, None)
            if value is True or (value and value != 1):
                settings.leave_to_script(field, f"the Trainer does it itself, by its {name}")
                break
