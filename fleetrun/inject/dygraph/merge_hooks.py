"""Patches all code of Paddle that steps, clears or clips gradients, for gradient merge."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import updates
from ..import_hooks import after_import, in_place_of, watch_method
from ..paddle_api import tensors
from . import backward
from .gradient_accumulation import GradientMerge, count_write, refuse


def install(merge: GradientMerge) -> None:
    """Patch Paddle's classes."""
    after_import("paddle.optimizer", lambda module: _optimizers(module, merge))
    after_import("paddle.optimizer.lr", lambda module: _schedulers(module, merge))
    after_import("paddle.amp.grad_scaler", lambda module: _scalers(module, merge))
    after_import("paddle.nn.utils", lambda module: _clips(module, merge))
    # Tensors have no module of their own to wait for.
    after_import("paddle.nn.layer.layers", lambda _: _tensors(merge))
    backward.listen_last(merge)
    atexit.register(merge.report_end)


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

    def refuse_closures(*_: Any, **__: Any) -> None:
        refuse("LBFGS runs several backwards in one step")

    def wrap(kind: Any) -> None:
        for method in (step, minimize):
            name = method.__name__
            if name in vars(kind):
                # Its `step` takes a closure.
                in_place_of(kind, name)(refuse_closures if kind.__name__ == "LBFGS" else method)
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
                in_place_of(getattr(module, name), "__init__")(functools.partial(_stage_1, merge))

    after_import(f"{updates.DYGRAPH}.hybrid_parallel_optimizer", outermost)
    after_import(f"{updates.DYGRAPH}.dygraph_sharding_optimizer", stage_1)
    for number in (2, 3):
        name = f"GroupShardedStage{number}"
        after_import(
            f"paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage{number}",
            functools.partial(_refuse_stage, name),
        )


def _refuse_stage(name: str, module: ModuleType) -> None:
    """Refuse the sharded model NAME: stage 2 or 3."""

    @in_place_of(getattr(module, name), "__init__")
    def __init__(*_: Any, **__: Any) -> None:
        refuse(f"{name} reduces gradients in each backward")


def _note_pipeline(merge: GradientMerge, configs: Any) -> None:
    merge.hint = "; pipeline_configs.accumulate_steps does the same within train_batch"
    for name in ("dp_comm_overlap", "sharding_comm_overlap"):
        if getattr(configs, name):
            merge.give_up(
                f"pp_configs.{name} sends gradients in each train_batch:"
                " pipeline_configs.accumulate_steps merges there"
            )


def _stage_1(
    merge: GradientMerge, init: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> None:
    """Initialize an optimizer SELF that updates this rank's share of the parameters."""
    # OPTIMIZER will have only its share, but the gradients of all are merged.
    merge.keep_whole(optimizer)
    init(self, optimizer, *args, **kwargs)
    if self.comm_overlap:
        merge.give_up(
            f"{type(self).__name__} with sharding_configs.comm_overlap sends gradients in each"
            " backward: sharding_configs.accumulate_steps merges there"
        )


def _schedulers(module: ModuleType, merge: GradientMerge) -> None:
    def schedule(step: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        for current in merge.all():
            if getattr(current.optimizer(), "_learning_rate", None) is not self:
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
        if current is None:
            return unscale(self, optimizer)
        if not current.is_last:
            return None
        result = unscale(self, optimizer)
        current.see()
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
        result = clip(several, *args, **kwargs)
        for current in merge.owners(several):
            current.see()
        return result

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        if hasattr(module, name):
            in_place_of(module, name)(merged)


def _tensors(merge: GradientMerge) -> None:
    """Patch what clears a gradient, and what writes tensors without a new in-place version."""
    kind = tensors.tensor_class()
    clear = kind.clear_gradient
    gradient = kind.grad

    # Optimizers and layers clear gradients by it, too.
    @functools.wraps(clear)
    def clear_gradient(self: Any, *args: Any, **kwargs: Any) -> Any:
        for owner in merge.owners_of(self):
            owner.clear(id(self))
        return clear(self, *args, **kwargs)

    def assign(self: Any, value: Any) -> None:
        for owner in merge.owners_of(self) if value is None else ():
            owner.clear(id(self))
        gradient.__set__(self, value)
        count_write(self._grad_ivar())

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def writing(self: Any, *args: Any, **options: Any) -> Any:
            result = write(self, *args, **options)
            count_write(self)
            return result

        return writing

    kind.clear_gradient = clear_gradient
    kind.grad = property(gradient.__get__, assign, doc=gradient.__doc__)
    kind.set_value = counted(kind.set_value)
    kind.copy_ = counted(kind.copy_)
