"""Tells when a backward begins and when it has ended, however it was started."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


class Listener(Protocol):
    """Who wants to know; all of them hear of every outermost backward."""

    def begin(self) -> None:
        """Backward is about to run."""

    def finish(self) -> None:
        """Backward is done: every gradient is there that will be."""

    def abandon(self) -> None:
        """Backward has failed."""


# In the order in which they came, which is the same on all ranks; they go with their models.
_listeners: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
_numbers = itertools.count()
# Those who hear of each end when all others have.
_last: list[Listener] = []
_depth = 0
_run: Callable[..., Any] | None = None


def listen(listener: Listener) -> None:
    """Tell LISTENER of every outermost backward from now on, as long as it lives."""
    _listeners[next(_numbers)] = listener


def listen_last(listener: Listener) -> None:
    """Tell LISTENER, too, after all others, who may change gradients when a backward ends."""
    _last.append(listener)


def is_nested() -> bool:
    """Whether a backward runs inside another one, as recomputation does."""
    return _depth > 1


def watch(core: ModuleType) -> None:
    """Watch the one function of Paddle's CORE through which every backward goes."""
    global _run  # noqa: PLW0603 - one Paddle
    _run = run = core.eager.run_backward
    core.eager.run_backward = _watched(run)


def run_unseen(*args: Any) -> None:
    """Run a backward of our own, of which nobody hears."""
    assert _run is not None  # noqa: S101 - nothing is reduced before `watch`
    _run(*args)


def _watched(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        global _depth  # noqa: PLW0603 - autograd of one process
        if _depth:
            _depth += 1
            try:
                return run(*args, **kwargs)
            finally:
                _depth -= 1
        listeners = [*_listeners.values(), *_last]
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
