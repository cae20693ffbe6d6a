"""Patches all code of Paddle that steps, clears or clips gradients, for gradient merge."""

from __future__ import annotations

import atexit
import functools
import types
from typing import TYPE_CHECKING, Any

from .. import updates
from ..import_hooks import after_import, in_place_of, watch_method
from ..paddle_api import tensors
from ..parameter_history import watch_writes
from . import backward
from .gradient_accumulation import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .gradient_accumulation import GradientMerge


_CLIPPED_SHARES = (
    "fleetrun: gradient_merge: the script clips gradients, of which each rank accumulates only its"
    " share: give the optimizer a grad_clip, or use the strategy without gradient_merge."
)


def install(merge: GradientMerge) -> None:
    """Patch Paddle's classes."""
    after_import("paddle.optimizer", lambda module: _optimizers(module, merge))
    after_import("paddle.optimizer.lr", lambda module: _schedulers(module, merge))
    after_import("paddle.amp.grad_scaler", lambda module: _scalers(module, merge))
    after_import("paddle.nn.utils", lambda module: _clips(module, merge))
    after_import("paddle.nn.layer.layers", lambda module: _layers(module, merge))
    # Tensors have no module of their own to wait for.
    after_import("paddle.nn.layer.layers", lambda _: _tensors(merge))
    after_import(
        "paddle.distributed.communication.stream", lambda module: _collectives(module, merge)
    )
    merge.is_installed = True
    backward.listen_last(merge)
    atexit.register(merge.report_partial_rounds)


def _optimizers(module: ModuleType, merge: GradientMerge) -> None:
    def step(step: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        update = functools.partial(step, self, *args, **kwargs)
        if updates.is_model_average(type(self)):
            return merge.average(updates.parameters_of(self), update)
        current = merge.of(self)
        return update() if current is None else merge.step(current, update)

    def minimize(minimize: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(minimize, self, *args, **kwargs)
        return ([], []) if result is None else result

    def clear_grad(clear: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        merge.of(self)
        parameters = updates.parameters_of(unwrap(self))
        return merge.clear(parameters, lambda: clear(self, *args, **kwargs), _remove_gradient)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "fleetrun: gradient_merge: LBFGS runs several backwards in one step, so its gradients"
            " cannot be merged."
        )

    def wrap(kind: Any) -> None:
        for method in (step, minimize, clear_grad):
            name = method.__name__
            if name in vars(kind):
                # Its `step` takes a closure.
                is_refused = kind.__name__ == "LBFGS" and method is not clear_grad
                in_place_of(kind, name)(refuse if is_refused else method)
        # Known before the first backward, which then need not be reduced; and not every class calls
        # the `__init__` of its base.
        if "__init__" in vars(kind):
            watch_method(kind, "__init__", after=merge.of)

    updates.wrap_subclasses(module.Optimizer, wrap)
    _sharing(merge, step, minimize)


def _sharing(merge: GradientMerge, step: Callable[..., Any], minimize: Callable[..., Any]) -> None:
    """Patch the code that shares a model among ranks and averages gradients before a step."""

    def outermost(module: ModuleType) -> None:
        kind: Any = module.HybridParallelOptimizer
        in_place_of(kind, "step")(step)
        in_place_of(kind, "minimize")(minimize)
        # Trainers average gradients themselves, in what they read of them, and call this.
        in_place_of(kind, "_step")(step)

        @in_place_of(kind, "__init__")
        def __init__(init: Any, self: Any, optimizer: Any, hcg: Any, strategy: Any) -> None:
            init(self, optimizer, hcg, strategy)
            if hcg.get_pipe_parallel_world_size() > 1:
                _note_pipeline(merge, strategy.hybrid_configs["pp_configs"])

    def stage_1(module: ModuleType) -> None:
        for name in ("DygraphShardingOptimizer", "DygraphShardingOptimizerV2"):
            if hasattr(module, name):
                _stage_1(getattr(module, name), merge)

    after_import(f"{updates.DYGRAPH}.hybrid_parallel_optimizer", outermost)
    after_import(f"{updates.DYGRAPH}.dygraph_sharding_optimizer", stage_1)
    for number in (2, 3):
        name = f"group_sharded_stage{number}"
        after_import(
            f"paddle.distributed.fleet.meta_parallel.sharding.{name}",
            functools.partial(_later_stage, f"GroupShardedStage{number}", merge, step),
        )


def _note_pipeline(merge: GradientMerge, configs: Any) -> None:
    merge.hint = "; pipeline_configs.accumulate_steps does the same within train_batch"
    for name in ("dp_comm_overlap", "sharding_comm_overlap"):
        if getattr(configs, name):
            merge.give_up(
                f"pp_configs.{name} sends gradients in each train_batch:"
                " pipeline_configs.accumulate_steps merges there"
            )


def _stage_1(kind: Any, merge: GradientMerge) -> None:
    """Patch the class KIND of an optimizer that updates this rank's share of the parameters."""

    @in_place_of(kind, "__init__")
    def __init__(init: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # The optimizer will have only its share, but the gradients of all are merged.
        merge.keep_whole(optimizer)
        init(self, optimizer, *args, **kwargs)
        if self.comm_overlap:
            merge.give_up(
                f"{kind.__name__} with sharding_configs.comm_overlap sends gradients in each"
                " backward: sharding_configs.accumulate_steps merges there"
            )

    @in_place_of(kind, "clear_grad")
    def clear_grad(clear: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        current = merge.of(self)
        # Paddle empties the memory of all fused gradients at once.
        if not (self.tensor_fusion and current is not None and current.merged):
            clear(self, *args, **kwargs)


def _later_stage(
    name: str, merge: GradientMerge, step: Callable[..., Any], module: ModuleType
) -> None:
    """Patch the methods that the sharded model NAME gives its optimizers: stage 2 or 3."""

    def redefine_step(model: Any) -> None:
        for optimizer in sharding_optimizers(model):
            merge.keep_reduced(optimizer, functools.partial(reduced_gradients, model))
            merged = functools.partial(step, optimizer.step.__func__)
            optimizer.step = types.MethodType(merged, optimizer)

    def redefine_clear(model: Any) -> None:
        for optimizer in sharding_optimizers(model):
            clear = functools.partial(_clear_unless_merged, merge, optimizer.clear_grad)
            optimizer.clear_grad = types.MethodType(clear, optimizer)

    kind = getattr(module, name)
    watch_method(kind, "_redefine_opt_step", after=redefine_step)
    watch_method(kind, "_redefine_opt_clear", after=redefine_clear)


def _clear_unless_merged(
    merge: GradientMerge, clear: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any
) -> None:
    current = merge.of(optimizer)
    if current is None or not current.merged:
        clear(*args, **kwargs)


def sharding_optimizers(model: Any) -> list[Any]:
    """Return the optimizers of MODEL (stage 2 or 3)."""
    return getattr(model, "_sharding_optimizers", None) or [model._optim]


def reduced_gradients(model: Any) -> list[Any]:
    """Return the gradients of MODEL (stage 2 or 3) that this rank keeps."""
    gradients = []
    for parameter in model.parameters():
        gradient = getattr(parameter, "bw_storage", None)
        if gradient is None:
            gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            gradients.append(gradient)
    return gradients


def _schedulers(module: ModuleType, merge: GradientMerge) -> None:
    def schedule(step: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        for current in merge.all():
            if getattr(current.optimizer, "_learning_rate", None) is not self:
                continue
            together = current.steps_unscheduled == 1
            current.steps_unscheduled = 0
            if together and not current.is_updated and kwargs.get("epoch") is None:
                return None
        return step(self, *args, **kwargs)

    def wrap(kind: Any) -> None:
        if "step" in vars(kind):
            in_place_of(kind, "step")(schedule)

    updates.wrap_subclasses(module.LRScheduler, wrap)


def _scalers(module: ModuleType, merge: GradientMerge) -> None:
    # The scalers with a merged step since their last `update`, and those with a real step: an
    # `update` after merged steps only is skipped, too.
    merged_scalers: set[int] = set()
    stepped_scalers: set[int] = set()

    def step(
        skipped: Any, step: Callable[..., Any], self: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        current = merge.of(optimizer)
        if current is None:
            return step(self, optimizer, *args, **kwargs)
        if not current.is_last:
            merge.step(current, lambda: None)
            merged_scalers.add(id(self))
            return skipped
        stepped_scalers.add(id(self))
        return merge.step_scaled(current, lambda: step(self, optimizer, *args, **kwargs))

    in_place_of(module.AmpScaler, "minimize")(functools.partial(step, (None, None)))
    in_place_of(module.GradScaler, "step")(functools.partial(step, None))

    # Every way to unscale calls this.
    @in_place_of(module.AmpScaler, "_unscale")
    def unscale(unscale: Callable[..., Any], self: Any, optimizer: Any) -> Any:
        current = merge.of(optimizer)
        if current is not None:
            if not current.is_last:
                return None
            current.divide()
        result = unscale(self, optimizer)
        if current is not None:
            current.remember_gradients()
        return result

    @in_place_of(module.GradScaler, "update")
    def update(update: Callable[..., Any], self: Any) -> Any:
        is_merged = id(self) in merged_scalers and id(self) not in stepped_scalers
        merged_scalers.discard(id(self))
        stepped_scalers.discard(id(self))
        return None if is_merged else update(self)


def _clips(module: ModuleType, merge: GradientMerge) -> None:
    def merged(clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        import paddle

        several = [parameters] if isinstance(parameters, paddle.Tensor) else list(parameters)
        if not merge.reduced.isdisjoint(map(id, several)):
            raise RuntimeError(_CLIPPED_SHARES)
        for current in merge.owners(several):
            if not current.is_last:
                # Only the merged gradient is to be clipped.
                return paddle.to_tensor(0.0, place=several[0].place)
            current.divide()
        result = clip(several, *args, **kwargs)
        for current in merge.owners(several):
            current.remember_gradients()
        return result

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        if hasattr(module, name):
            in_place_of(module, name)(merged)


def _layers(module: ModuleType, merge: GradientMerge) -> None:
    @in_place_of(module.Layer, "clear_gradients")
    def clear_gradients(clear: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return merge.clear(
            self.parameters(), lambda: clear(self, *args, **kwargs), _remove_gradient
        )


def _tensors(merge: GradientMerge) -> None:
    """Patch the methods of a single parameter: `clear_gradient`, reading and setting `grad`."""
    kind = tensors.tensor_class()
    clear = kind.clear_gradient

    @functools.wraps(clear)
    def clear_gradient(self: Any, *args: Any, **kwargs: Any) -> Any:
        return merge.clear([self], lambda: clear(self, *args, **kwargs), _remove_gradient)

    kind.clear_gradient = clear_gradient
    gradient = kind.grad

    def read(self: Any) -> Any:
        return merge.read(self, gradient.__get__)

    def assign(self: Any, value: Any) -> None:
        merge.write(self, value, gradient.__set__)

    kind.grad = property(read, assign, doc=gradient.__doc__)
    watch_writes()


def _collectives(module: ModuleType, merge: GradientMerge) -> None:
    """Count the allreduces that are not made by reducers."""

    @in_place_of(module, "all_reduce")
    def all_reduce(reduce: Any, *args: Any, **kwargs: Any) -> Any:
        merge.other_calls += 1
        return reduce(*args, **kwargs)


def _remove_gradient(parameter: Any) -> None:
    """Leave PARAMETER without a gradient, merged or not."""
    kind = tensors.tensor_class()
    to_zeros = False
    # Patched or not.
    getattr(kind.clear_gradient, "__wrapped__", kind.clear_gradient)(parameter, to_zeros)
