"""Callbacks around every backward, however it was started.

Paddle calls *final hooks* at the end of a backward: mixed precision with `master_grad=True` (GPUs
only) replaces the gradients by fp32 copies there. Paddle's own reducer has averaged them by then.
So those hooks wait here until our reducers have ended, which is after Paddle's backward.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
_last_listeners: list[BackwardListener] = []
_is_patched = False
_depth = 0
# How many backwards have run inside others so far, as in recomputation.
nested = 0
# Final hooks that the running backward, or one nested in it, has called.
_final_hooks: list[Callable[[], Any]] = []


def listen(listener: BackwardListener) -> None:
    """Notify LISTENER of every outermost backward as long as it lives."""
    _listeners.append(weakref.ref(listener, _listeners.remove))


def ignore(listener: BackwardListener) -> None:
    """Stop notifying LISTENER."""
    _listeners.remove(weakref.ref(listener))


def listen_last(listener: BackwardListener) -> None:
    """Notify LISTENER after all others, which may change gradients when a backward ends."""
    _last_listeners.append(listener)


def patch(core: ModuleType) -> None:
    """Patch the one function of Paddle's CORE that every backward calls, once."""
    global _is_patched  # one Paddle
    if _is_patched:
        return
    _is_patched = True
    core.eager.run_backward = _observed(core.eager.run_backward)
    core.eager._add_backward_final_hook = _postponing(core.eager._add_backward_final_hook)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Run a backward of fleetrun's own without callbacks."""
    global _depth  # autograd of one process
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _postponing(add: Callable[[Callable[[], Any]], Any]) -> Callable[..., Any]:
    """Postpone the hooks that ADD adds until the reducers of the outermost backward are done."""

    def _add_backward_final_hook(hook: Callable[[], Any]) -> Any:
        def called() -> None:
            if not _depth:
                # `paddle.grad` adds hooks, too.
                hook()
                return
            # A backward that raises does not reach its final hooks: they stay for the next one.
            _final_hooks.append(hook)

        return add(called)

    return _add_backward_final_hook


def _observed(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        global _depth, nested  # autograd of one process
        if _depth:
            _depth += 1
            nested += 1
            try:
                return run(*args, **kwargs)
            finally:
                _depth -= 1
        reducers: list[Any] = [*filter(None, map(weakref.ref.__call__, _listeners))]
        listeners = reducers + _last_listeners
        for listener in listeners:
            listener.begin()
        _depth = 1
        try:
            result = run(*args, **kwargs)
        except BaseException:
            for listener in listeners:
                listener.abandon()
            raise
        finally:
            _depth = 0
        for listener in reducers:
            listener.finish()
        if _final_hooks:
            hooks = _final_hooks[:]
            _final_hooks.clear()
            for hook in hooks:
                hook()
        for listener in listeners[len(reducers) :]:
            listener.finish()
        return result

    return run_backward
