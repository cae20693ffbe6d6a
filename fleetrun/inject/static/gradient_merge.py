"""Completes Paddle's gradient merge of static graphs, so that it equals a larger batch.

* A scheduler of the learning rate that is stepped with each run advances once per update; one that
  is stepped once in several runs (per epoch) advances whenever the script says so.
* Paddle counts the runs of all programs in one variable: each program gets a counter of its own.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from ..import_hooks import after_import
from ..paddle_api import programs

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNTERS = ("gradient_merge_step", "gradient_merge_k", "gradient_merge_zero")


class _SinceStep:
    """What was run since a scheduler was stepped."""

    def __init__(self) -> None:
        self.runs = 0
        self.is_updated = True


_since_step: weakref.WeakKeyDictionary[Any, _SinceStep] = weakref.WeakKeyDictionary()


def install() -> None:
    """Wait for the schedulers."""
    after_import("paddle.optimizer.lr", _watch)


def ran(main: Any, *, is_updated: bool) -> None:
    """Hear that MAIN, which merges, ran, and whether it updated its parameters."""
    scheduler = getattr(main, "lr_scheduler", None)
    if scheduler is not None:
        since = _since_step.setdefault(scheduler, _SinceStep())
        since.runs += 1
        since.is_updated = is_updated


def settle(main: Any, startup: Any) -> None:
    """Give MAIN a counter of its own, if it merges."""
    block = main.global_block()
    if not block.has_var(_COUNTERS[0]):
        return
    from paddle.utils import unique_name

    for name in _COUNTERS:
        # The generator's own numbers may begin anew for each program.
        own = unique_name.generate(f"{name}_{id(main)}")
        for each in (main, startup):
            programs.rename(each.global_block(), name, own)
            programs.sync(each)


def _watch(module: Any) -> None:
    base = module.LRScheduler
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and issubclass(kind, base) and "step" in vars(kind):
            kind.step = _stepping(vars(kind)["step"])  # type: ignore[attr-defined]


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def merged(self: Any, *args: Any, **kwargs: Any) -> Any:
        since = _since_step.get(self)
        if since is not None:
            is_with_run = since.runs == 1
            since.runs = 0
            # The argument of others is the epoch that they are to be in, whatever was before.
            is_relative = not args or type(self).__name__ == "ReduceOnPlateau"
            if is_with_run and not since.is_updated and is_relative and "epoch" not in kwargs:
                return None
        return step(self, *args, **kwargs)

    return merged
