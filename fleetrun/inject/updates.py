"""Callbacks before and after each update of the parameters by an optimizer."""

from __future__ import annotations

import atexit
import functools
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

from . import border
from .import_hooks import after_import, watch_method

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from .evidence import Evidence
    from .spec import StrategySpec

    # Takes the optimizer (dygraph) or the program (static), and the number of updates so far.
    UpdateCallback = Callable[[Any, int], object]
    # Takes the number of an update among those of its optimizer or program, from 1.
    IsDue = Callable[[int], bool]

# Methods of optimizers that update parameters; they call each other.
_METHODS = ("step", "minimize", "_apply_optimize")
# By module: wrappers whose methods call those of an optimizer. The end of their call is the end of
# an update: they average gradients before it, and send parameters after it.
DYGRAPH = "paddle.distributed.fleet.meta_optimizers.dygraph_optimizer"
_WRAPPERS = {
    f"{DYGRAPH}.dygraph_sharding_optimizer": (
        "DygraphShardingOptimizer",
        "DygraphShardingOptimizerV2",
    ),
    f"{DYGRAPH}.hybrid_parallel_optimizer": ("HybridParallelOptimizer",),
    f"{DYGRAPH}.heter_parallel_optimizer": ("HeterParallelOptimizer",),
    "paddle.distributed.fleet.utils.mix_precision_utils": ("MixPrecisionOptimizer",),
    "paddle.distributed.auto_parallel.api": ("_ShardOptimizer",),
    "paddle.incubate.asp.asp": ("OptimizerWithSparsityGuarantee",),
}
# By module: classes that step the optimizer they are given, or skip the step.
_SCALERS = {
    "paddle.amp.grad_scaler": ("AmpScaler", "GradScaler"),
    f"{DYGRAPH}.hybrid_parallel_gradscaler": ("HybridParallelGradScaler",),
}
# Attributes in which wrappers keep what they wrap.
_INNER = ("_inner_opt", "inner_optimizer", "_optimizer", "_optim")
_STAGE3 = "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3"
# Attributes in which a scaler records non-finite gradients: Paddle 3's name, and 2's.
_FOUND = ("_cache_found_inf", "_cache_founf_inf")
# The number of updates between checks that means none.
NEVER = -1
# With a number N: the updates that are always checked. From the third on, everything that a reducer
# keeps between backwards (the order of buckets, their memory) is in use.
_ALWAYS = (1, 3)
# With `auto`: after updates 1, 2, 4, ... and then every so many.
_EVERY = 1024
_ALL = float("inf")
# Each with what says for which updates it is called (None: all), and the last of all updates for
# which it is.
_before: list[tuple[Callable[[Any], None], IsDue | None, float]] = []
_after: list[tuple[UpdateCallback, IsDue | None, float]] = []
_skipped: list[tuple[UpdateCallback, IsDue | None, float]] = []
_count = 0
# By the id of an optimizer or program: its updates so far, with those that a scaler has skipped.
_numbers: dict[int, int] = {}
# The outermost patched call that is under way.
_call: _Call | None = None
# By the id of an optimizer: the wrapper through which it was last stepped, if it was ever.
_wrappers: dict[int, weakref.ref[Any]] = {}


class _Call:
    """A call that updates: its outermost optimizer or wrapper, and the first optimizer in it."""

    outermost: Any = None
    optimizer: Any = None


def install(_spec: StrategySpec, proof: Evidence) -> None:
    """Count the updates of every optimizer."""

    def name_graph(_source: Any, _number: int) -> None:
        proof.graph = proof.graph or "dygraph"

    def count_skipped(_source: Any, _number: int) -> None:
        proof.counts["skipped"] = proof.counts.get("skipped", 0) + 1

    @border.watching("the count of updates")
    def end() -> None:
        skipped = proof.counts.get("skipped", 0)
        if skipped:
            were = "1 update was" if skipped == 1 else f"{skipped} updates were"
            proof.note(f"{were} skipped by a GradScaler: gradients were not finite")

    # Before the evidence is written at exit.
    atexit.register(end)
    proof.count_updates = count
    on_update(name_graph, "the count of updates", last=1)
    on_skipped(count_skipped, "the count of updates")
    watch()


def watch() -> None:
    """Call the callbacks around the updates of every optimizer."""
    after_import(
        "paddle.optimizer.optimizer", lambda module: wrap_subclasses(module.Optimizer, _wrap)
    )
    for module, names in {**_WRAPPERS, **_SCALERS}.items():
        after_import(module, functools.partial(_patch_wrappers, names))
    after_import(_STAGE3, _patch_stage3)


def on_update(
    callback: UpdateCallback, what: str, due: IsDue | None = None, last: float = _ALL
) -> None:
    """Call CALLBACK after each update up to LAST that is DUE; WHAT names it in remarks."""
    _after.append((border.watching(what)(callback), due, last))


def before_update(callback: Callable[[Any], None], what: str, due: IsDue | None = None) -> None:
    """Call CALLBACK with the optimizer before every update in dynamic graphs that is DUE."""
    _before.append((border.watching(what)(callback), due, _ALL))


def on_skipped(callback: UpdateCallback, what: str, due: IsDue | None = None) -> None:
    """Call CALLBACK after each DUE update that a scaler has skipped, with the updates before it."""
    _skipped.append((border.watching(what)(callback), due, _ALL))


def count() -> int:
    """Return the number of updates so far."""
    return _count


def number_of(source: Any) -> int:
    """Return the number of updates of SOURCE so far, with those that a scaler has skipped."""
    return _numbers.get(id(source), 0)


def is_due(every: int | str, number: int) -> bool:
    """Whether there is a check after the update NUMBER, from 1; EVERY is `check_ranks`.

    >>> [update for update in range(1, 3100) if is_due("auto", update)]
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072]
    >>> [update for update in range(1, 11) if is_due(5, update)]
    [1, 3, 5, 10]
    """
    if every == NEVER:
        return False
    if not isinstance(every, int):
        return not (number & number - 1 if number < _EVERY else number % _EVERY)
    return number in _ALWAYS or (every > 0 and not number % every)


def _advance(source: Any) -> int:
    key = id(source)
    if key not in _numbers:
        weakref.finalize(source, _numbers.pop, key, None)
    number = _numbers[key] = _numbers.get(key, 0) + 1
    return number


def record(source: Any) -> None:
    """Record that SOURCE, an optimizer or a program, has just updated parameters."""
    global _count  # one process, one training
    _count += 1
    _call_due(_after, _advance(source), source, _count)


def _call_due(callbacks: list[tuple[Any, IsDue | None, float]], number: int, *args: Any) -> None:
    for callback, due, last in tuple(callbacks):
        if _count <= last and (due is None or due(number)):
            callback(*args)


def wrap_subclasses(base: Any, wrap: Callable[[Any], None]) -> None:
    """Call WRAP with the class BASE and each of its subclasses, including those defined later."""
    kinds = [base]
    for kind in kinds:
        kinds += [subclass for subclass in kind.__subclasses__() if subclass not in kinds]
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
    return any(base.__name__ == "ModelAverage" for base in kind.__mro__)


def wrapper_of(optimizer: Any) -> Any:
    """Return the object that the script steps for OPTIMIZER: a wrapper, or the optimizer itself."""
    reference = _wrappers.get(id(optimizer))
    return (reference and reference()) or optimizer


def chain(wrapper: Any) -> Iterator[Any]:
    """Yield WRAPPER, what it wraps, and so on down to the optimizer itself."""
    while wrapper is not None:
        yield wrapper
        inner = [own_attribute(wrapper, name) for name in _INNER]
        wrapper = next((candidate for candidate in inner if candidate not in (None, wrapper)), None)


def own_attribute(owner: Any, name: str) -> Any:
    """Return the attribute NAME of OWNER itself, not of an object that it wraps; None without one.

    `vars` would slow down each later access to OWNER's attributes in Python 3.11.
    """
    try:
        return object.__getattribute__(owner, name)
    except AttributeError:
        return None


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups that OPTIMIZER, which is not a wrapper, updates now."""
    # Groups that a script adds later are only in `_param_groups`.
    return flat(
        getattr(optimizer, "_param_groups", None) or getattr(optimizer, "_parameter_list", None)
    )


def flat(entries: Any) -> list[Any]:
    """Return the parameters of ENTRIES, each once: parameters, groups of them, or None."""
    parameters: list[Any] = []
    for entry in entries or ():
        parameters += entry["params"] if isinstance(entry, dict) else [entry]
    # Shared ones may be listed twice.
    return [*dict(zip(map(id, parameters), parameters)).values()]


def _wrap(kind: Any) -> None:
    if not is_model_average(kind):
        _record_methods(kind, is_optimizer=True)


def _patch_wrappers(names: Sequence[str], module: ModuleType) -> None:
    for name in names:
        kind = getattr(module, name, None)
        if kind is not None:
            _record_methods(kind, is_optimizer=False)


def _patch_stage3(module: ModuleType) -> None:
    def record_step(model: Any) -> None:
        optimizer = model._optim
        # Offloaded parameters are updated on the CPU, while the script's device stays the same.
        step = _recorded(optimizer.step.__func__, is_optimizer=False)
        optimizer.step = types.MethodType(step, optimizer)

    watch_method(module.GroupShardedStage3, "_redefine_opt_step", after=record_step)


def _record_methods(kind: Any, *, is_optimizer: bool) -> None:
    for name in _METHODS:
        method = kind.__dict__.get(name)
        if callable(method):
            setattr(kind, name, _recorded(method, is_optimizer=is_optimizer))


def _recorded(method: Callable[..., Any], *, is_optimizer: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def update(owner: Any, /, *args: Any, **options: Any) -> Any:
        global _call
        is_outermost = _call is None
        call = _call = _call or _Call()
        if call.outermost is None and (is_optimizer or not _is_scaler(owner)):
            call.outermost = owner
        if is_optimizer and call.optimizer is None and _is_dynamic():
            call.optimizer = owner
            if call.outermost is not owner or id(owner) in _wrappers:
                _wrappers[id(owner)] = weakref.ref(call.outermost)
            _call_due(_before, number_of(owner) + 1, owner)
        if not is_outermost:
            return method(owner, *args, **options)
        try:
            result = method(owner, *args, **options)
        finally:
            _call = None
        if not is_optimizer and _is_skipped(owner):
            source = call.optimizer or [*chain([*args, *options.values()][0])][-1]
            _call_due(_skipped, _advance(source), source, _count)
        elif call.optimizer is not None:
            record(call.optimizer)
        return result

    return update


def _is_scaler(owner: Any) -> bool:
    return any(
        base.__name__ in names for base in type(owner).__mro__ for names in _SCALERS.values()
    )


def _is_skipped(owner: Any) -> bool:
    """Whether OWNER is a scaler that has found non-finite gradients."""
    return any(bool(own_attribute(owner, name)) for name in _FOUND)


def _is_dynamic() -> bool:
    """Whether the methods change parameters now, rather than only write a program."""
    paddle: Any = sys.modules["paddle"]
    return paddle.in_dynamic_mode() and not paddle.base.dygraph.base.in_to_static_mode()
