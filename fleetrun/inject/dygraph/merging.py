"""Lets everything in Paddle that steps, clears or clips obey the rounds of gradient merge."""

from __future__ import annotations

import atexit
import functools
from typing import TYPE_CHECKING, Any

from .. import updates
from ..imports import after_import
from . import backward
from .merge import flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from .merge import Round, Rounds


def install(rounds: Rounds, flush: Callable[[Round], None], *, steps_tail: bool) -> None:
    """Intercept every class of Paddle's; FLUSH averages what a round has, over the ranks."""
    after_import("paddle.optimizer", lambda module: _optimizers(module, rounds))
    after_import("paddle.optimizer.lr", lambda module: _schedulers(module, rounds))
    after_import("paddle.amp.grad_scaler", lambda module: _scalers(module, rounds))
    after_import("paddle.nn.utils", lambda module: _clips(module, rounds))
    after_import("paddle.nn.layer.layers", lambda module: _layers(module, rounds))
    # Tensors have no module of their own to wait for.
    after_import("paddle.nn.layer.layers", lambda _: _tensors(rounds))
    if steps_tail:
        after_import("paddle.io.reader", lambda module: _loaders(module, rounds, flush))
    backward.listen_last(rounds)
    atexit.register(rounds.say_what_is_left)


def _optimizers(module: ModuleType, rounds: Rounds) -> None:  # noqa: C901 - one wrapper each
    def stepping(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def merged(self: Any, *args: Any, **kwargs: Any) -> Any:
            update = functools.partial(step, self, *args, **kwargs)
            if updates.only_averages(type(self)):
                return rounds.average(flat(self._parameter_list), id(self), update)
            current = rounds.of(self)
            return update() if current is None else rounds.step(current, update, self)

        return merged

    def minimizing(minimize: Callable[..., Any]) -> Callable[..., Any]:
        stepped = stepping(minimize)

        @functools.wraps(minimize)
        def merged(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = stepped(self, *args, **kwargs)
            return ([], []) if result is None else result

        return merged

    def clearing(clear: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clear)
        def merged(self: Any, *args: Any, **kwargs: Any) -> Any:
            current = rounds.of(self)
            if current is None:
                current = rounds.pending(flat(getattr(self, "_parameter_list", None)))
            return rounds.clear(current, lambda: clear(self, *args, **kwargs))

        return merged

    def making(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            # Known before the first backward, which then need not be reduced.
            rounds.of(self)

        return __init__

    def refused(_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*_: Any, **__: Any) -> None:
            message = (
                "fleetrun: gradient_merge: LBFGS runs several backwards in one step; it cannot be"
                " merged."
            )
            raise RuntimeError(message)

        return step

    wrappers = {"step": stepping, "minimize": minimizing, "clear_grad": clearing}

    def wrap(kind: Any) -> None:
        for name, wrapper in wrappers.items():
            if name in vars(kind):
                # Its `step` wants the closure.
                chosen = refused if kind.__name__ == "LBFGS" and name != "clear_grad" else wrapper
                setattr(kind, name, chosen(vars(kind)[name]))
        # Not every class calls its base's.
        if "__init__" in vars(kind):
            kind.__init__ = making(kind.__init__)

    updates.wrap_all(module.Optimizer, wrap)


def _schedulers(module: ModuleType, rounds: Rounds) -> None:
    def scheduling(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def merged(self: Any, *args: Any, **kwargs: Any) -> Any:
            for current in rounds.all():
                if getattr(current.optimizer, "_learning_rate", None) is not self:
                    continue
                together = current.steps_unscheduled == 1
                current.steps_unscheduled = 0
                if together and not current.is_updated and kwargs.get("epoch") is None:
                    current.after[id(self)] = lambda: step(self, *args, **kwargs)
                    return None
            return step(self, *args, **kwargs)

        return merged

    def wrap(kind: Any) -> None:
        if "step" in vars(kind):
            kind.step = scheduling(vars(kind)["step"])

    updates.wrap_all(module.LRScheduler, wrap)


def _scalers(module: ModuleType, rounds: Rounds) -> None:  # noqa: C901 - one wrapper each
    # Scalers of which a step was merged since the last update, which then is, too; unless
    # another optimizer of theirs was really stepped.
    merged_scalers: set[int] = set()
    stepped_scalers: set[int] = set()

    def stepping(step: Callable[..., Any], skipped: Any) -> Callable[..., Any]:
        @functools.wraps(step)
        def merged(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            current = rounds.of(optimizer)
            if current is None:
                return step(self, optimizer, *args, **kwargs)
            if not current.is_last:
                rounds.step(current, lambda: None)
                current.scaler = self
                merged_scalers.add(id(self))
                return skipped
            stepped_scalers.add(id(self))
            return rounds.complete(current, lambda: step(self, optimizer, *args, **kwargs))

        return merged

    def unscaling(unscale: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(unscale)
        def merged(self: Any, optimizer: Any) -> Any:
            current = rounds.of(optimizer)
            if current is not None:
                if not current.is_last:
                    current.before["unscale"] = lambda: unscale(self, optimizer)
                    return None
                current.settle()
            return unscale(self, optimizer)

        return merged

    def updating(update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def merged(self: Any) -> Any:
            is_merged = id(self) in merged_scalers and id(self) not in stepped_scalers
            merged_scalers.discard(id(self))
            stepped_scalers.discard(id(self))
            return None if is_merged else update(self)

        return merged

    base, scaler = module.AmpScaler, module.GradScaler
    base.minimize = stepping(base.minimize, (None, None))
    base._unscale = unscaling(base._unscale)
    scaler.step = stepping(scaler.step, None)
    scaler.update = updating(scaler.update)


def _clips(module: ModuleType, rounds: Rounds) -> None:
    def clipping(clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def merged(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            import paddle

            several = [parameters] if isinstance(parameters, paddle.Tensor) else list(parameters)
            for current in rounds.owners(several):
                if not current.is_last:
                    # Only the merged gradient is clipped.
                    current.before[clip, tuple(map(id, several))] = lambda: clip(
                        several, *args, **kwargs
                    )
                    return paddle.zeros([])
                current.settle()
            return clip(several, *args, **kwargs)

        return merged

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        if hasattr(module, name):
            setattr(module, name, clipping(getattr(module, name)))


def _layers(module: ModuleType, rounds: Rounds) -> None:
    clear = module.Layer.clear_gradients

    @functools.wraps(clear)
    def clear_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        pending = rounds.pending(self.parameters())
        return rounds.clear(pending, lambda: clear(self, *args, **kwargs))

    module.Layer.clear_gradients = clear_gradients


def _tensors(rounds: Rounds) -> None:
    """Let a script clear parameter by parameter, too, and hear when it puts gradients in."""
    from paddle.base import core

    kind: Any = core.eager.Tensor
    clear = kind.clear_gradient

    @functools.wraps(clear)
    def clear_gradient(self: Any, *args: Any, **kwargs: Any) -> Any:
        pending = rounds.pending([self])
        return rounds.clear(pending, lambda: clear(self, *args, **kwargs))

    kind.clear_gradient = clear_gradient
    gradient = kind.grad

    def replace(self: Any, value: Any) -> None:
        rounds.replace(self)
        gradient.__set__(self, value)

    kind.grad = property(gradient.__get__, replace, doc=gradient.__doc__)


def _loaders(module: ModuleType, rounds: Rounds, flush: Callable[[Round], None]) -> None:
    iterate = module.DataLoader.__iter__

    @functools.wraps(iterate)
    def __iter__(self: Any) -> Iterator[Any]:
        return _UntilTheEnd(iterate(self), rounds, flush)

    module.DataLoader.__iter__ = __iter__


class _UntilTheEnd:
    """An iterator of a DataLoader; when it ends, so do the rounds that were fed by it."""

    def __init__(self, batches: Any, rounds: Rounds, flush: Callable[[Round], None]) -> None:
        self._batches = batches
        self._rounds = rounds
        self._flush = flush
        self._steps = rounds.steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> _UntilTheEnd:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            # One for evaluation, in the middle of a round, feeds none.
            if self._rounds.steps != self._steps:
                self._steps = self._rounds.steps
                waiting = [each for each in self._rounds.all() if each.skipped]
                scalers = {id(each.scaler): each.scaler for each in waiting if each.scaler}
                for current in waiting:
                    _apply(current, self._flush)
                    self._rounds.tails += 1
                for scaler in scalers.values():
                    scaler.update()
            raise


def _apply(current: Round, flush: Callable[[Round], None]) -> None:
    """Update with what there is of a round."""
    scaler, before, after = current.scaler, current.before, current.after
    flush(current)
    current.cut_short()
    current.settle()
    for prepare in before.values():
        prepare()
    optimizer = current.outermost
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
    optimizer.clear_grad()
    for follow in after.values():
        follow()
    current.steps_unscheduled = 0
