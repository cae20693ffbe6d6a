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
# The only listener; None: there are several, or none. Variables, as each step reads both.
only: weakref.ref[BackwardListener] | None = None
# The same if its `begin` is not to be called for the next backward.
informed: weakref.ref[BackwardListener] | None = None
_depth = 0
# How many backwards have run inside others so far, as in recomputation.
nested = 0
# Final hooks that the running backward, or one nested in it, has called.
_final_hooks: list[Callable[[], Any]] = []


def listen(listener: BackwardListener) -> None:
    """Notify LISTENER of every outermost backward as long as it lives."""
    _listeners.append(weakref.ref(listener, _remove))
    _find_only()


def ignore(listener: BackwardListener) -> None:
    """Stop notifying LISTENER."""
    _remove(weakref.ref(listener))


def listen_last(listener: BackwardListener) -> None:
    """Notify LISTENER after all others, which may change gradients when a backward ends."""
    _last_listeners.append(listener)
    _find_only()


def _remove(listener: weakref.ref[BackwardListener]) -> None:
    _listeners.remove(listener)
    _find_only()


def _find_only() -> None:
    global informed, only  # autograd of one process
    only = _listeners[0] if len(_listeners) == 1 and not _last_listeners else None
    informed = None


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
        global _depth, informed  # autograd of one process
        listener = informed and not _depth and informed()
        if not listener:
            return _run_announced(run, *args, **kwargs)
        # As in most steps.
        _depth = 1
        try:
            result = run(*args, **kwargs) if kwargs else run(*args)
        except BaseException:
            listener.abandon()
            raise
        finally:
            _depth, informed = 0, None
        listener.finish()
        if _final_hooks:
            _call_final_hooks()
        return result

    return run_backward


def _run_announced(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call RUN, after a call of all listeners unless it is part of another backward."""
    global _depth, informed, nested
    if _depth:
        _depth += 1
        nested += 1
        try:
            return run(*args, **kwargs)
        finally:
            _depth -= 1
    reducers: list[Any] = [*filter(None, map(weakref.ref.__call__, _listeners))]
    for listener in (*reducers, *_last_listeners):
        listener.begin()
    _depth = 1
    try:
        result = run(*args, **kwargs)
    except BaseException:
        for listener in (*reducers, *_last_listeners):
            listener.abandon()
        raise
    finally:
        _depth, informed = 0, None
    for listener in reducers:
        listener.finish()
    _call_final_hooks()
    for listener in _last_listeners:
        listener.finish()
    return result


def _call_final_hooks() -> None:
    hooks = _final_hooks[:]
    _final_hooks.clear()
    for hook in hooks:
        hook()
