"""Puts our reducer into `paddle.DataParallel`, where fleet's models and plain ones both end."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import buckets, settings
from . import communicators, report
from .reducer import Limits, Reducer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from ..evidence import Evidence
    from ..wish import Wish
    from .merge import Round

# Any of these asks for our reducer.
BUCKETED = (
    "fuse_all_reduce_ops",
    "fuse_grad_size_in_MB",
    "fuse_grad_size_in_num",
    "fuse_grad_size_in_TFLOPS",
    "last_comm_group_size_MB",
    "nccl_comm_num",
    "sync_nccl_allreduce",
    "use_hierarchical_allreduce",
    "gradient_merge",
)
_OURS = __name__.rpartition(".dygraph.")[0]
# Which argument of DataParallel says the same.
_ARGUMENTS = {
    "comm_buffer_size": "fuse_grad_size_in_MB",
    "last_comm_buffer_size": "last_comm_group_size_MB",
}


def limits(gradient_bytes: int, own_bytes: int, own_last_bytes: int | None = None) -> Limits:
    """Return what bounds a bucket of a model whose gradients have GRADIENT_BYTES.

    OWN_BYTES is the model's own limit, which DataParallel gives it; OWN_LAST_BYTES is that of the
    last bucket, if the script itself has given one.
    """
    if not settings.effective("fuse_all_reduce_ops", default=True):
        return Limits(most_gradients=1)
    size = settings.effective("fuse_grad_size_in_MB")
    most_bytes = (
        float(own_bytes)
        if size is None
        else buckets.auto_limit_bytes(gradient_bytes)
        if size == "auto"
        else float(size) * buckets.MEBIBYTE
    )
    counts = [
        int(settings.effective(name))
        for name in ("fuse_grad_size_in_num", "fuse_grad_size_in_TFLOPS")
        if settings.effective(name)
    ]
    last = settings.effective("last_comm_group_size_MB")
    return Limits(
        most_bytes,
        min(counts, default=None),
        own_last_bytes if last is None else float(last) * buckets.MEBIBYTE,
    )


class Models:
    """Every model under DataParallel in this process, in the order in which they were made."""

    def __init__(
        self, asked: Wish, proof: Evidence, must_sync: Callable[[Sequence[Any]], bool]
    ) -> None:
        self._asked = asked
        self._proof = proof
        self._must_sync = must_sync
        self._report = report.Report(asked, proof)
        # By their numbers; they live as long as their models.
        self._reducers: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()
        self._made = 0
        self._lanes: list[communicators.Lane] = []
        # Whether the script itself limits the last bucket of the model that is being made.
        self._limits_last = False
        # How often `flush` has averaged a model.
        self._flushes = 0

    def count_calls(self) -> int:
        """Return how many allreduces there were, of all models."""
        return sum(lane.calls for lane in self._lanes)

    def flush(self, current: Round) -> None:
        """Average, now, what gradients there are of the models that CURRENT updates.

        Raises RuntimeError if the ranks have not all merged the same number of micro-steps.
        """
        owned = {id(parameter) for parameter in current.parameters}
        for reducer in list(self._reducers.values()):
            if any(id(parameter) in owned for parameter in reducer.everything):
                self._flushes += 1
                _agree(reducer.ranks, self._flushes, current.skipped)
                reducer.restart()
                reducer.flush()

    def patch(self, module: ModuleType) -> None:
        """Put our reducer into the module `paddle.distributed.parallel`."""
        cls = module.DataParallel
        cls.__init__ = self._heeding_arguments(cls.__init__)
        cls.init_reducer = self._with_ours(cls.init_reducer)
        cls.forward = _arming(cls.forward)

    def _heeding_arguments(self, init: Callable[..., None]) -> Callable[..., None]:
        """Note where the script itself says how large buckets are."""
        signature = inspect.signature(init)

        @functools.wraps(init)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            # fleet passes its strategy's values on, which were looked at when they were set.
            is_paddles = _caller().startswith("paddle.")
            given = signature.bind(model, *args, **kwargs).arguments
            for argument, name in _ARGUMENTS.items():
                if argument in given and name in self._asked.strategy and not is_paddles:
                    settings.script_says(name, given[argument])
            self._limits_last = "last_comm_buffer_size" in given and not is_paddles
            init(model, *args, **kwargs)
            if not hasattr(model, "_reducer"):
                self._report.alone()

        return __init__

    def _with_ours(self, init_reducer: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init_reducer)
        def replaced(model: Any) -> None:
            import paddle

            trained, sparse = _parameters(model, paddle)
            if not any(not each.stop_gradient for each in trained):
                # Paddle has the words for it, or a sparse model is all its own.
                init_reducer(model)
                return
            dense = [each for each in trained if id(each) not in sparse]
            plain = [each for each in dense if not each.stop_gradient]
            # What Paddle would do, to compare with.
            model.group_indices = paddle.base.core.eager_assign_group_by_size(
                plain,
                [False] * len(plain),
                [model.last_comm_buffer_size, model.comm_buffer_size],
            )
            rest = [each for each in trained if id(each) in sparse and not each.stop_gradient]
            # Where Paddle keeps its own.
            model._reducer = self._ours(model, dense, rest)

        return replaced

    def _ours(self, model: Any, dense: list[Any], rest: list[Any]) -> Reducer:
        ranks = list(model.group.ranks)
        number, self._made = self._made, self._made + 1
        ids = communicators.Ids(number, ranks)
        size = self._group_size(len(ranks))
        levels = communicators.divide(ranks, size) if size else None
        overlaps = not settings.effective("sync_nccl_allreduce", default=False)
        lanes = []
        for _ in range(max(1, int(settings.effective("nccl_comm_num", 1)))):
            carrier: communicators.OneLevel | communicators.TwoLevels = (
                communicators.OneLevel(communicators.connect(ranks, ids.take()))
                if levels is None
                else communicators.TwoLevels(levels, ids)
            )
            lanes.append(communicators.Lane(carrier, overlaps=overlaps))
        self._lanes += lanes
        made = report.Made(number, lanes, levels, len(model.group_indices), overlaps, len(ranks))
        # Not the model itself, which has the reducer: both shall go when the script lets it go.
        own_bytes = model.comm_buffer_size
        own_last_bytes = model.last_comm_buffer_size if self._limits_last else None
        reducer = Reducer(
            dense,
            sparse_parameters=rest,
            group=model.group.process_group,
            lanes=lanes,
            ranks=ranks,
            limits=lambda total: limits(total, own_bytes, own_last_bytes),
            finds_unused=model.find_unused_parameters,
            must_sync=self._must_sync,
            reduced=lambda reducer: self._report.reduced(reducer, made),
        )
        for older in list(self._reducers.values()):
            if older.has_any([*dense, *rest]):
                older.share()
                reducer.share()
                # The newer model may take its place for good.
                older.rest()
        self._reducers[number] = reducer
        return reducer

    def _group_size(self, nranks: int) -> int | None:
        """Return how many ranks are in one group of the hierarchical allreduce, if it is any."""
        if not settings.effective("use_hierarchical_allreduce"):
            return None
        size = settings.effective("hierarchical_allreduce_inter_nranks")
        size = int(size or self._asked.topology.ranks_per_node)
        return size if 1 < size < nranks else None


def _agree(ranks: Sequence[int], number: int, steps: int) -> None:
    """See that all RANKS come here with as many STEPS, before the first sends anything."""
    hint = (
        "the DataLoaders of all ranks must have as many batches, and none may be left before its"
        " end. --merge_tail=drop leaves the rest out."
    )
    name = f"tail/{'-'.join(map(str, ranks))}/{number}"
    said = communicators.meet(name, steps, ranks)
    missing = [rank for rank, steps in said.items() if steps is None]
    if missing:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        message = (
            f"fleetrun: merge_tail=step: {who} did not come to the end of a DataLoader; {hint}"
        )
        raise RuntimeError(message)
    if len(set(said.values())) > 1:
        each = ", ".join(f"rank {rank} {steps}" for rank, steps in said.items())
        message = f"fleetrun: merge_tail=step: micro-steps of the last round: {each}; {hint}"
        raise RuntimeError(message)


def _caller() -> str:
    """Name the module that makes the model; others of ours may stand between it and us."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _arming(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def armed(model: Any, *args: Any, **kwargs: Any) -> Any:
        import paddle

        ours = getattr(model, "_reducer", None)
        if isinstance(ours, Reducer) and paddle.is_grad_enabled():
            # As Paddle does: it is the forward under `no_sync` that counts.
            ours.hear_of_forward(syncs=model.grad_need_sync)
        return forward(model, *args, **kwargs)

    return armed


def _parameters(model: Any, paddle: Any) -> tuple[list[Any], set[int]]:
    """Return the parameters that DataParallel averages, and the ids of the sparse ones."""
    found: dict[int, Any] = {}
    sparse = set()
    for layer in model.sublayers():
        for _, parameter in layer.named_parameters(include_sublayers=False):
            if parameter is None or id(parameter) in found or getattr(parameter, "no_sync", False):
                continue
            found[id(parameter)] = parameter
            # As Paddle tells them, before there is any gradient.
            if isinstance(layer, paddle.nn.layer.common.Embedding) and layer._sparse:
                sparse.add(id(parameter))
    return list(found.values()), sparse
