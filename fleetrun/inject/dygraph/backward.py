"""Callbacks around every backward, however it was started.

Paddle calls *final hooks* at the end of a backward, also of one that is nested in another, as in
recomputation: mixed precision with `master_grad=True` (GPUs only) replaces the gradients by fp32
copies there. So those hooks wait here until the outermost backward has ended and is averaged.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class BackwardListener(Protocol):
    """Notified of every outermost backward."""

    def begin(self) -> None:
        """Backward is about to run."""

    def finish(self) -> None:
        """Backward has ended: no more gradients will arrive."""

    def abandon(self) -> None:
        """Backward has raised."""


# In the order of `listen`, which is the same on all ranks; dropped with their models.
_listeners: list[weakref.ref[BackwardListener]] = []
# Notified after all others: they may change gradients when a backward ends.
last_listeners: list[BackwardListener] = []
_is_running = False
# The backward of another thread waits for its turn: it is no nested one.
_turn = threading.RLock()
# How many backwards have run inside others so far, as in recomputation.
nested = 0
# Final hooks that the running backward, or one nested in it, has called.
_final_hooks: list[Callable[[], Any]] = []


def listen(listener: BackwardListener) -> None:
    """Notify LISTENER of every outermost backward as long as it lives."""
    _listeners.append(weakref.ref(listener, _listeners.remove))


@functools.lru_cache
def patch(core: ModuleType) -> None:
    """Patch the one function of Paddle's CORE that every backward calls, once."""
    core.eager.run_backward = _observed(core.eager.run_backward)
    core.eager._add_backward_final_hook = _postponing(core.eager._add_backward_final_hook)


def _postponing(add: Callable[[Callable[[], Any]], Any]) -> Callable[..., Any]:
    """Postpone the hooks that ADD adds until the gradients are averaged."""

    def _add_backward_final_hook(hook: Callable[[], Any]) -> Any:
        # `paddle.grad` calls hooks, too, outside of a backward.
        return add(lambda: _final_hooks.append(hook) if _is_running else hook())

    return _add_backward_final_hook


def _observed(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_backward(*args: Any, **options: Any) -> Any:
        global _is_running, nested  # autograd of one process
        with _turn:
            if _is_running:
                nested += 1
                return run(*args, **options)
            reducers: list[Any] = [*filter(None, (reference() for reference in _listeners))]
            several = [*reducers, *last_listeners]
            for listener in several:
                listener.begin()
            _is_running = True
            try:
                result = run(*args, **options)
            except BaseException:
                for listener in several:
                    listener.abandon()
                raise
            finally:
                _is_running = False
            for listener in reducers:
                listener.finish()
            hooks = _final_hooks[:]
            _final_hooks.clear()
            for hook in hooks:
                hook()
            for listener in last_listeners:
                listener.finish()
            return result

    return run_backward
