"""Callbacks around every backward, however it was started."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class BackwardListener(Protocol):
    """Is told of every outermost backward."""

    def begin(self) -> None:
        """Backward is about to run."""

    def finish(self) -> None:
        """Backward has ended: no more gradients will come."""

    def abandon(self) -> None:
        """Backward has raised."""


# In the order of `listen`, which is the same on all ranks. They are dropped with their models.
_listeners: weakref.WeakValueDictionary[int, BackwardListener] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_last_listeners: list[BackwardListener] = []
_depth = 0
_run_backward: Callable[..., Any] | None = None


def listen(listener: BackwardListener) -> None:
    """Tell LISTENER of every outermost backward from now on, as long as it lives."""
    _listeners[next(_numbers)] = listener


def listen_last(listener: BackwardListener) -> None:
    """Tell LISTENER after all others, who may change gradients when a backward ends."""
    _last_listeners.append(listener)


def is_nested() -> bool:
    """Whether a backward runs inside another one, as recomputation does."""
    return _depth > 1


def patch(core: ModuleType) -> None:
    """Patch the one function of Paddle's CORE that every backward calls."""
    global _run_backward  # noqa: PLW0603 - one Paddle
    _run_backward = core.eager.run_backward
    core.eager.run_backward = _observed(core.eager.run_backward)


def run_unobserved(*args: Any) -> None:
    """Run a backward of our own, without callbacks."""
    assert _run_backward is not None  # noqa: S101 - nothing is reduced before `patch`
    _run_backward(*args)


def _observed(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        global _depth  # noqa: PLW0603 - autograd of one process
        if _depth:
            _depth += 1
            try:
                return run(*args, **kwargs)
            finally:
                _depth -= 1
        listeners = [*_listeners.values(), *_last_listeners]
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
        for listener in listeners:
            listener.finish()
        return result

    return run_backward
