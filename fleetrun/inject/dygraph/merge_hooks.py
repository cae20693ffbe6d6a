"""Patches all code of Paddle that steps, clears or clips gradients, for gradient merge."""

from __future__ import annotations

import atexit
import functools
from typing import TYPE_CHECKING, Any

from .. import updates
from ..import_hooks import after_import, in_place_of, watch_method
from ..paddle_api import tensors
from . import backward
from .merge_round import refuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .merge import GradientMerge

_SHARDED = "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage"


def install(merge: GradientMerge) -> None:
    """Patch Paddle's classes."""
    for name, patch in {
        "paddle.optimizer": _optimizers,
        "paddle.optimizer.lr": _schedulers,
        "paddle.amp.grad_scaler": _scalers,
        "paddle.nn.utils": _clips,
        # Tensors have no module of their own to wait for.
        "paddle.nn.layer.layers": _tensors,
        f"{updates.DYGRAPH}.hybrid_parallel_optimizer": _hybrid,
    }.items():
        after_import(name, functools.partial(patch, merge))
    for number in (2, 3):
        after_import(
            f"{_SHARDED}{number}", functools.partial(_refuse_stage, f"GroupShardedStage{number}")
        )
    backward.last_listeners.append(merge)
    atexit.register(merge.report_end)


def _step(
    merge: GradientMerge, step: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Merge, or call STEP of the optimizer SELF."""
    update = functools.partial(step, self, *args, **kwargs)
    if updates.is_model_average(type(self)):
        owners = merge.owners(updates.parameters_of(self))
        return update() if all(owner.is_updated for owner in owners) else None
    current = merge.of(self)
    return update() if current is None else merge.step(current, update)


def _minimize(
    merge: GradientMerge, minimize: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any
) -> Any:
    result = _step(merge, minimize, self, *args, **kwargs)
    return ([], []) if result is None else result


def _optimizers(merge: GradientMerge, module: ModuleType) -> None:
    def wrap(kind: Any) -> None:
        for name, method in (("step", _step), ("minimize", _minimize)):
            # The `step` of LBFGS takes a closure.
            if name in vars(kind) and kind.__name__ == "LBFGS":
                in_place_of(kind, name)(lambda *_, **__: refuse("LBFGS runs backwards in a step"))
            elif name in vars(kind):
                in_place_of(kind, name)(functools.partial(method, merge))
        # Known before the first backward, which then need not be reduced; and not every class calls
        # the `__init__` of its base.
        if "__init__" in vars(kind):
            watch_method(kind, "__init__", after=merge.of)

    updates.wrap_subclasses(module.Optimizer, wrap)


def _hybrid(merge: GradientMerge, module: ModuleType) -> None:
    kind: Any = module.HybridParallelOptimizer
    in_place_of(kind, "minimize")(functools.partial(_minimize, merge))
    # Trainers average gradients themselves, in what they read of them, and call `_step`.
    for name in ("step", "_step"):
        in_place_of(kind, name)(functools.partial(_step, merge))

    @in_place_of(kind, "__init__")
    def __init__(init: Any, self: Any, optimizer: Any, hcg: Any, strategy: Any) -> None:
        init(self, optimizer, hcg, strategy)
        if hcg.get_pipe_parallel_world_size() > 1:
            refuse("a pipeline merges by pipeline_configs.accumulate_steps")
        if hcg.get_sharding_parallel_world_size() > 1:
            refuse("optimizers of sharding reduce and update shares of the parameters")


def _refuse_stage(name: str, module: ModuleType) -> None:
    reason = f"{name} reduces gradients in each backward"
    in_place_of(getattr(module, name), "__init__")(lambda *_, **__: refuse(reason))


def _schedulers(merge: GradientMerge, module: ModuleType) -> None:
    """Advance a scheduler that is stepped with its optimizer, or more often, as a large batch does.

    One that is stepped once in several steps (per epoch) advances whenever the script steps it.
    """

    def schedule(kind: Any, step: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The step of a subclass may call that of its base.
        is_outermost = kind is next(base for base in type(self).__mro__ if "step" in vars(base))
        for current in merge.all() if is_outermost else ():
            if getattr(current.optimizer(), "_learning_rate", None) is self:
                together, current.steps_unscheduled = current.steps_unscheduled <= 1, 0
                if together and not current.is_updated and kwargs.get("epoch") is None:
                    return None
        return step(self, *args, **kwargs)

    def wrap(kind: Any) -> None:
        if "step" in vars(kind):
            in_place_of(kind, "step")(functools.partial(schedule, kind))

    updates.wrap_subclasses(module.LRScheduler, wrap)


def _scalers(merge: GradientMerge, module: ModuleType) -> None:
    """Unscale, look for infinities and update the scale at the last step of a round only."""
    # By the id of a scaler: whether a step since its last `update` has been a last one.
    stepped: dict[int, bool] = {}

    def step(
        merged: Any, step: Callable[..., Any], self: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        current = merge.of(optimizer)
        if current is None:
            return step(self, optimizer, *args, **kwargs)
        is_last = current.is_last
        stepped[id(self)] = is_last or stepped.get(id(self), False)
        if not is_last:
            merge.step(current, lambda: None)
            return merged
        result = step(self, optimizer, *args, **kwargs)
        if current.merged:
            # It has found an infinity: the round is lost, as a large batch would be.
            current.start_round()
        return result

    in_place_of(module.AmpScaler, "minimize")(functools.partial(step, (None, None)))
    in_place_of(module.GradScaler, "step")(functools.partial(step, None))

    # Every way to unscale calls this.
    @in_place_of(module.AmpScaler, "_unscale")
    def unscale(unscale: Callable[..., Any], self: Any, optimizer: Any) -> Any:
        current = merge.of(optimizer)
        return unscale(self, optimizer) if current is None or current.is_last else None

    @in_place_of(module.GradScaler, "update")
    def update(update: Callable[..., Any], self: Any) -> Any:
        return update(self) if stepped.pop(id(self), True) else None


def _clips(merge: GradientMerge, module: ModuleType) -> None:
    """Clip the gradients of the last micro-step only; in the others the norm is 0."""

    def clip(clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        import paddle

        several = [parameters] if isinstance(parameters, paddle.Tensor) else list(parameters)
        owners = merge.owners(several)
        if len({owner.merged for owner in owners}) > 1:
            refuse("gradients of optimizers that step at different rates are clipped together")
        if all(owner.is_last for owner in owners):
            norm = clip(several, *args, **kwargs)
            for owner in owners:
                owner.adopt_clipped()
            return norm
        return paddle.to_tensor(0.0)

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        if hasattr(module, name):
            in_place_of(module, name)(clip)


def _tensors(merge: GradientMerge, _module: ModuleType) -> None:
    """Patch what clears a gradient, and what writes one without a trace."""
    kind = tensors.tensor_class()
    gradient = kind.grad

    def clear(parameter: Any) -> None:
        for current in merge.all():
            current.clear(id(parameter))

    def write(plain: Callable[..., Any], tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Leave a trace of a changed gradient, as other methods do."""
        is_left = any(current.has_left(tensor) for current in merge.all())
        before = tensor.clone() if is_left else None
        result = plain(tensor, *args, **kwargs)
        if before is not None and not bool((tensor == before).all()):
            tensor._bump_inplace_version()
        return result

    def assign(parameter: Any, value: Any) -> None:
        if value is None:
            clear(parameter)
        # Paddle copies the value into the gradient, if there is one.
        write(lambda _: gradient.__set__(parameter, value), parameter._grad_ivar())

    for name in ("set_value", "copy_"):
        in_place_of(kind, name)(write)
    # Optimizers and layers clear gradients by it, too.
    watch_method(kind, "clear_gradient", before=clear)
    kind.grad = property(gradient.__get__, assign, doc=gradient.__doc__)
