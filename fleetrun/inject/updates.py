"""Callbacks before and after each update of the parameters by an optimizer."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from . import border
from .import_hooks import after_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

    # Gets the optimizer (dygraph) or the program (static), and the number of updates so far.
    UpdateCallback = Callable[[Any, int], None]

_METHODS = ("step", "minimize")
_before: list[Callable[[Any], None]] = []
_after: list[UpdateCallback] = []
_count = 0
# How many patched methods are running within each other: `minimize` may call `step`, and an
# optimizer may consist of others. The outermost call is the update.
_depth = 0


def install(_spec: StrategySpec, proof: Evidence) -> None:
    """Count the updates of every optimizer."""

    def count(_source: Any, number: int) -> None:
        proof.updates = number
        if not proof.graph:
            proof.graph = "dygraph"

    on_update(count, "the count of updates")
    watch()


def watch() -> None:
    """Call the callbacks around the updates of every optimizer."""
    after_import("paddle.optimizer.optimizer", _patch)


def on_update(callback: UpdateCallback, what: str) -> None:
    """Call CALLBACK after every update, in the order of registration; WHAT says what it does."""
    _after.append(border.watching(what)(callback))


def before_update(callback: Callable[[Any], None], what: str) -> None:
    """Call CALLBACK with the optimizer before every update in dynamic graphs."""
    _before.append(border.watching(what)(callback))


def record(source: Any) -> None:
    """Record that SOURCE, an optimizer or a program, has just updated parameters."""
    global _count  # one process, one training
    _count += 1
    for callback in _after:
        callback(source, _count)


def wrap_subclasses(base: Any, wrap: Callable[[Any], None]) -> None:
    """Call WRAP with the class BASE and every subclass, also with those defined later."""
    kinds = [base]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    for kind in kinds:
        wrap(kind)
    inherited = base.__dict__.get("__init_subclass__")

    def __init_subclass__(kind: Any, /, **options: Any) -> None:
        if inherited is None:
            super(base, kind).__init_subclass__(**options)
        else:
            inherited.__get__(None, kind)(**options)
        wrap(kind)

    base.__init_subclass__ = classmethod(__init_subclass__)


def is_model_average(kind: Any) -> bool:
    """Whether the optimizer class KIND only averages parameters that others update."""
    return any(each.__name__ == "ModelAverage" for each in kind.__mro__)


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters that OPTIMIZER, which is no wrapper, updates by now, of all groups."""
    # Groups that a script adds later stand there only.
    entries = getattr(optimizer, "_param_groups", None)
    found: list[Any] = []
    for entry in entries or getattr(optimizer, "_parameter_list", None) or ():
        found += entry["params"] if isinstance(entry, dict) else [entry]
    return found


def _patch(module: ModuleType) -> None:
    wrap_subclasses(module.Optimizer, _wrap)


def _wrap(kind: Any) -> None:
    if is_model_average(kind):
        return
    for name in _METHODS:
        method = kind.__dict__.get(name)
        if callable(method):
            setattr(kind, name, _recorded(method))


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def update(optimizer: Any, *args: Any, **options: Any) -> Any:
        global _depth
        if _depth == 0 and _before and _is_dynamic():
            for callback in _before:
                callback(optimizer)
        _depth += 1
        try:
            result = method(optimizer, *args, **options)
        finally:
            _depth -= 1
        if _depth == 0 and _is_dynamic():
            record(optimizer)
        return result

    return update


def _is_dynamic() -> bool:
    """Whether the methods change parameters: elsewhere they only write a program."""
    paddle: Any = sys.modules["paddle"]
    return bool(paddle.in_dynamic_mode()) and not paddle.base.dygraph.base.in_to_static_mode()
