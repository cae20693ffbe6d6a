"""Averages gradients in buckets, in place of Paddle, when a hybrid-parallel optimizer steps.

There, Paddle sums the gradients of data parallelism in parts of 128 MB, and those of sharding stage
1 one by one; no field changes this. A pipeline, or a script that accumulates, runs many backwards
before a step, so everything is sent once, at the step.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Any

from .. import buckets, settings
from ..evidence import EFFECTIVE
from ..import_hooks import after_import, in_place_of, watch_method
from ..paddle_api import tensors
from . import backward
from .reducer import Reducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType

    from ..evidence import Evidence

    # Averages gradients (parameters, group, scale, owners); returns False if it cannot.
    ReduceAtStep = Callable[[Sequence[Any], Any, float, Mapping[int, int]], bool]

# Paddle's limit of a bucket.
PADDLES_BYTES = 128 << 20
_UTILITIES = "paddle.distributed.fleet.utils.hybrid_parallel_util"
# The settings with which sharding stage 1 uses buffers, and the setting of a buffer's size.
_FUSED = ("comm_overlap", "tensor_fusion")
_BUFFERS = "comm_buffer_size_MB"
# By Paddle's class: how it sends gradients itself.
SENDERS: dict[str, str] = {}
_SHARDING = "paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer"


class StepReducer(Reducer):
    """Averages the gradients of parameters, all of which have one, at each call of `reduce`.

    OWNERS has, by the id of a parameter, the index of the rank that updates it and alone gets the
    sum. Gradients are multiplied by SCALE before they are summed.
    """

    def __init__(self, *args: Any, owners: Mapping[int, int], scale: float, **options: Any) -> None:
        self._owners = owners
        super().__init__(*args, **options)
        self._scale = scale
        # Backwards do not concern it.
        backward.ignore(self)

    def reduce(self) -> None:
        """Average the gradients, now."""
        self.restart()
        self.flush()

    def _arrange(self) -> None:
        super()._arrange()
        # At a step, every gradient is ready: no order is better than another.
        self._is_ordered = True

    def _watch(self, parameter: Any) -> None:
        """Do nothing: all gradients are there when it is called."""

    def _expect_last(self, parameter: Any) -> None:
        """Do nothing: no bucket waits for a gradient."""

    def _root_of(self, parameter: Any) -> int | None:
        return self._owners.get(id(parameter))


def install(reduce: ReduceAtStep, proof: Evidence) -> None:
    """Let REDUCE average gradients in place of Paddle at a step; note other senders."""
    after_import(_UTILITIES, lambda module: _replace_allreduces(module, reduce))
    after_import(_SHARDING, lambda module: _replace_reduces(module, reduce))
    after_import(_SHARDING, lambda module: _size_buffers(module, proof))
    parallel = "paddle.distributed.fleet.meta_parallel"
    for place, name, method in (
        ("sharding.group_sharded_stage2", "GroupShardedStage2", "__init__"),
        ("sharding.group_sharded_stage3", "GroupShardedStage3", "__init__"),
        ("pipeline_parallel", "PipelineParallel", "fused_gradient"),
    ):
        after_import(f"{parallel}.{place}", functools.partial(_note_sender, name, method))


def _note_sender(name: str, method: str, module: ModuleType) -> None:
    """Note that the class NAME sends gradients itself once its METHOD has prepared it."""

    def note(_model: Any) -> None:
        SENDERS[name] = "in each backward"

    watch_method(getattr(module, name), method, after=note)


def _size_buffers(module: ModuleType, proof: Evidence) -> None:
    """Give the buffers of sharding optimizers the limit of a bucket."""
    for name in ("DygraphShardingOptimizer", "DygraphShardingOptimizerV2"):
        kind: Any = getattr(module, name, None)
        if kind is not None:
            in_place_of(kind, "__init__")(functools.partial(_init_sized, name, proof))


def _init_sized(
    name: str, proof: Evidence, init: Callable[..., None], self: Any, optimizer: Any, *more: Any
) -> None:
    fleet: Any = sys.modules["paddle.distributed.fleet"]
    # Fleet's own copy of the script's strategy.
    configs = fleet.fleet._user_defined_strategy.strategy.hybrid_configs.sharding_configs
    has_buffers = name.endswith("V2") or any(getattr(configs, field) for field in _FUSED)
    has_field = has_buffers and _BUFFERS in configs.DESCRIPTOR.fields_by_name
    size = _asked_size(optimizer) if has_field and not configs.HasField(_BUFFERS) else 0
    if size:
        setattr(configs, _BUFFERS, size)
    init(self, optimizer, *more)
    if has_buffers:
        SENDERS[name] = f"in buffers of sharding_configs.{_BUFFERS}" if has_field else "in buffers"
    if size:
        text = f"by Paddle's own sharding_configs.{_BUFFERS} ({name})"
        proof.knob("fuse_grad_size_in_MB", EFFECTIVE, in_effect=size, evidence=text)


def _asked_size(optimizer: Any) -> int:
    """Return the requested bucket limit in whole MB, 0 if there is none."""
    size = settings.effective("fuse_grad_size_in_MB")
    if size == "auto":
        nbytes = sum(map(tensors.nbytes, optimizer._parameter_list))
        size = buckets.auto_limit_bytes(nbytes) / buckets.MEBIBYTE
    return math.ceil(size or 0)


def _replace_allreduces(module: ModuleType, reduce: ReduceAtStep) -> None:
    @in_place_of(module, "fused_allreduce_gradients_with_group")
    def fused_allreduce_gradients_with_group(
        paddles: Callable[..., None],
        parameter_list: Sequence[Any],
        group: Any,
        bucket_size: int = PADDLES_BYTES,
        scale: float | None = None,
    ) -> None:
        ours = _plain(parameter_list)
        if group is None:
            collective: Any = sys.modules["paddle.distributed.collective"]
            group = collective._get_default_group()
        factor = 1.0 / group.nranks if scale is None else scale
        if not (ours and reduce(ours, group, factor, {})):
            paddles(parameter_list, group, bucket_size, scale)


def _replace_reduces(module: ModuleType, reduce: ReduceAtStep) -> None:
    @in_place_of(module.DygraphShardingOptimizer, "reduce_gradients")
    def reduce_gradients(paddles: Any, self: Any, parameter_list: Sequence[Any], hcg: Any) -> None:
        group = hcg.get_sharding_parallel_group()
        # Paddle sends fused gradients itself, in buffers, perhaps during the backward.
        is_fused = any(getattr(self, name) for name in _FUSED)
        ours = [] if is_fused else _plain(parameter_list)
        owners = {id(parameter): self._param2rank[parameter.name] for parameter in ours}
        if not (ours and reduce(ours, group, 1.0 / group.nranks, owners)):
            paddles(self, parameter_list, hcg)


def _plain(parameters: Iterable[Any]) -> list[Any]:
    """Return those of PARAMETERS with a gradient, or none if any gradient is not plain."""
    trained = [parameter for parameter in parameters if parameter.trainable]
    if any(getattr(parameter, "main_grad", None) is not None for parameter in trained):
        SENDERS["Paddle"] = "where they are in main_grad"
        return []
    ready = [parameter for parameter in trained if parameter.grad is not None]
    for parameter in ready:
        if parameter.grad.is_selected_rows() or parameter.grad.dtype != parameter.dtype:
            return []
    return ready
