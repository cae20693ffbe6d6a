"""Installs our reducer in `paddle.DataParallel`, which fleet's models use, too."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import buckets, communicators, paddle_api, settings
from ..buckets import BucketLimits
from ..check_schedule import NEVER
from ..import_hooks import in_place_of
from ..paddle_api import private_names, tensors
from . import compression, handover, levels, refused_types, sparse
from .gradient_check import GradientCheck
from .reducer import Reducer, pack
from .reducer_report import ReducerReport, ReducerSetup
from .step_reducer import PADDLES_BYTES, StepReducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from ..communicators import Communicator
    from ..evidence import Evidence
    from ..spec import StrategySpec

# The fields that need our reducer.
REDUCER_FIELDS = (
    *buckets.FUSION,
    "nccl_comm_num",
    "sync_nccl_allreduce",
    "use_hierarchical_allreduce",
    "gradient_merge",
    *compression.DTYPES,
)
# Paddle's bucket limit at a step, and the most sets of parameters that we average there.
_PADDLES_LIMITS = BucketLimits(PADDLES_BYTES)
_MOST_AT_STEP = 8
_PACKAGE = __name__.rpartition(".dygraph.")[0]
# The arguments of DataParallel that set a field.
_ARGUMENTS = {
    "comm_buffer_size": "fuse_grad_size_in_MB",
    "last_comm_buffer_size": "last_comm_group_size_MB",
}


class Reducers:
    """The reducers of all DataParallel models of this process."""

    def __init__(
        self, spec: StrategySpec, proof: Evidence, must_sync: Callable[[Sequence[Any]], bool]
    ) -> None:
        self._spec = spec
        self._proof = proof
        self._must_sync = must_sync
        self._report = ReducerReport(spec, proof)
        # By the number of the model; they live as long as their models.
        self._reducers: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()
        self._models = 0
        self._pool = communicators.Pool()
        self._levels = levels.LevelChoice(self._pool, spec.topology)
        # Whether the script itself limits the last bucket of the model that is being made.
        self._script_limits_last = False
        # By the group and its parameters.
        self._at_step: dict[tuple[int, ...], StepReducer] = {}

    def count_calls(self) -> int:
        """Return the number of allreduces so far, of all models."""
        return self._pool.calls

    def reduce_at_step(
        self, parameters: Sequence[Any], group: Any, scale: float, owners: Mapping[int, int]
    ) -> bool:
        """Average the gradients of PARAMETERS over GROUP; see `StepReducer`.

        A collective call: all ranks of GROUP must make it. Return False if Paddle has to average.
        """
        if not paddle_api.has(private_names.REDUCER) or not self._must_sync(parameters):
            return paddle_api.has(private_names.REDUCER)
        key = (group.id, *map(id, parameters))
        reducer = self._at_step.get(key)
        if reducer is None:
            if len(self._at_step) >= _MOST_AT_STEP:
                return False
            reducer = self._at_step[key] = self._new_step_reducer(parameters, group, scale, owners)
        reducer.reduce()
        return True

    def _new_step_reducer(
        self, parameters: Sequence[Any], group: Any, scale: float, owners: Mapping[int, int]
    ) -> StepReducer:
        ranks = list(group.ranks)
        sizes, packed = pack(parameters, _step_limits)
        place = parameters[0].place
        size, why_levels = self._levels.choose(
            ranks, _bucket_bytes(sizes, packed), group.process_group, place
        )
        own, more = self._communicators(ranks, size, len(packed), place)
        hierarchy = communicators.split_ranks(ranks, size) if size else None
        compressed = compression.choose(own[0], ranks, communicators.global_rank())
        paddles_bytes = sizes
        if not owners:
            _, paddles = pack(parameters, lambda _: _PADDLES_LIMITS)
            paddles_bytes = _bucket_bytes(sizes, paddles)
        # Reduce to the owner only where that saves traffic.
        owners = {} if hierarchy or compressed else owners
        setup = ReducerSetup(
            *(self._models, own, hierarchy, paddles_bytes, settings.overlaps(), len(ranks)),
            *(compressed, why_levels, True),
        )
        self._models += 1
        every = NEVER if owners else self._spec.check_ranks
        return StepReducer(
            parameters,
            sparse_parameters=(),
            group=group.process_group,
            communicators=own,
            more_communicators=more,
            compression=compressed,
            ranks=ranks,
            limits=_step_limits,
            finds_unused=False,
            must_sync=self._must_sync,
            check=GradientCheck(group.process_group, len(ranks), every, self._proof),
            on_reduced=lambda reducer: self._report.reduced(reducer, setup),
            owners=owners,
            scale=scale,
        )

    def patch(self, module: ModuleType) -> None:
        """Patch the module `paddle.distributed.parallel`."""
        cls = module.DataParallel
        signature = inspect.signature(cls.__init__)
        in_place_of(cls, "__init__")(functools.partial(self._make_model, signature))
        in_place_of(cls, "init_reducer")(self._init_reducer)
        cls.no_sync = _announcing(cls.no_sync)

    def _make_model(
        self, signature: inspect.Signature, init: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Call INIT of a model; record the bucket sizes that the script passes to it."""
        # Values from fleet come from its strategy, and were recorded when they were set.
        is_paddles = _caller().startswith("paddle.")
        given = signature.bind(*args, **kwargs).arguments
        for argument, name in _ARGUMENTS.items():
            if argument in given and name in self._spec.strategy and not is_paddles:
                settings.set_by_script(name, given[argument])
        refused_types.check(given["layers"])
        self._script_limits_last = "last_comm_buffer_size" in given and not is_paddles
        init(*args, **kwargs)
        if not hasattr(args[0], "_reducer"):
            self._report.single_rank()

    def _init_reducer(self, init_reducer: Callable[..., None], model: Any) -> None:
        """Give MODEL our reducer, or call INIT_REDUCER."""
        import paddle

        parameters, sparse_ids = _parameters(model, paddle)
        is_trained = any(map(tensors.is_trained, parameters))
        # The ranks may have found since the start that some device lacks it.
        works = paddle_api.has(private_names.REDUCER)
        if not (is_trained and works) or (sparse_ids and not self._can_average_sparse_ones()):
            # Without a trained parameter Paddle raises its own error.
            init_reducer(model)
            return
        dense = [parameter for parameter in parameters if id(parameter) not in sparse_ids]
        trained = [parameter for parameter in dense if tensors.is_trained(parameter)]
        # As Paddle's own `init_reducer` does.
        model.group_indices = paddle.base.core.eager_assign_group_by_size(
            trained, [False] * len(trained), [model.last_comm_buffer_size, model.comm_buffer_size]
        )
        sparse.expect_dense(dense)
        tables = [
            parameter
            for parameter in parameters
            if id(parameter) in sparse_ids and tensors.is_trained(parameter)
        ]
        # The attribute in which Paddle keeps its own.
        model._reducer = self._new_reducer(model, dense, tables, init_reducer)

    def _paddles_bytes(self, model: Any, trained: list[Any]) -> list[int]:
        """Return the bytes of the buckets that Paddle builds from TRAINED without the strategy."""
        import paddle

        name, last = "last_comm_group_size_MB", model.last_comm_buffer_size
        if self._spec.strategy.get(name) is not None and not settings.script_wins(name):
            # The strategy has replaced the model's argument; this is its default.
            last = buckets.MEBIBYTE
        groups = paddle.base.core.eager_assign_group_by_size(
            trained, [False] * len(trained), [last, model.comm_buffer_size]
        )
        return _bucket_bytes(list(map(tensors.nbytes, trained)), groups)

    def _can_average_sparse_ones(self) -> bool:
        if paddle_api.has(private_names.SPARSE):
            return True
        self._report.falls_back(paddle_api.sentence([paddle_api.refusal(private_names.SPARSE)]))
        return False

    def _new_reducer(
        self, model: Any, dense: list[Any], tables: list[Any], init_reducer: Callable[[Any], None]
    ) -> Reducer:
        ranks = list(model.group.ranks)
        number, self._models = self._models, self._models + 1
        # No closure may hold the model: it holds the reducer, and both must go together.
        model_bytes = model.comm_buffer_size
        model_last_bytes = model.last_comm_buffer_size if self._script_limits_last else None

        paddles_limits: BucketLimits | None = None

        def limits(total: int) -> BucketLimits:
            # The script's limits of this model apply where the strategy sets none.
            default = BucketLimits(model_bytes, last_bytes=model_last_bytes)
            return paddles_limits or buckets.limits(total, default)

        trained = [parameter for parameter in dense if tensors.is_trained(parameter)]
        sizes, packed = pack(trained[::-1], limits)
        nbytes = _bucket_bytes(sizes, packed)
        group, place = model.group.process_group, (*dense, *tables)[0].place
        size, why_levels = self._levels.choose(ranks, nbytes, group, place)
        hierarchy = communicators.split_ranks(ranks, size) if size else None
        are_paddles = _are_equal(packed, model.group_indices)
        asked = self._asked()
        hands_over = (
            not tables
            and not model.find_unused_parameters
            and handover.suffices(asked, packed, has_levels=size, are_paddles=are_paddles)
            and handover.pays(sizes, is_synchronous=communicators.is_synchronous())
        )
        if hands_over and not (are_paddles or handover.limits_bytes(asked)):
            # With Paddle's own values, the fields leave its buckets as they are.
            are_paddles = True
            paddles_limits = BucketLimits(model_bytes, last_bytes=model.last_comm_buffer_size)
        lent = group if hands_over else None
        own, more = self._communicators(ranks, size, len(packed), place, lent=lent)
        compressed = compression.choose(own[0], ranks, communicators.global_rank())
        setup = ReducerSetup(
            number,
            own,
            hierarchy,
            self._paddles_bytes(model, trained),
            settings.overlaps(),
            len(ranks),
            compressed,
            why_levels,
        )
        make: Callable[..., Reducer] = Reducer
        if hands_over:
            own_limits = None if are_paddles else limits(sum(sizes))
            paddles = handover.PaddlesReducer(model, own_limits, init_reducer)
            make = functools.partial(handover.SparingReducer, paddles=paddles)
        reducer = make(
            dense,
            sparse_parameters=tables,
            group=group,
            communicators=own,
            more_communicators=more,
            compression=compressed,
            ranks=ranks,
            limits=limits,
            finds_unused=model.find_unused_parameters,
            must_sync=self._must_sync,
            check=GradientCheck(group, len(ranks), self._spec.check_ranks, self._proof),
            on_reduced=lambda reducer: self._report.reduced(reducer, setup),
        )
        for older in list(self._reducers.values()):
            if older.overlaps([*dense, *tables]):
                older.share_parameters()
                reducer.share_parameters()
                # The newer model may replace the older one for good.
                older.disarm()
        self._reducers[number] = reducer
        # At exit, no model can reuse them.
        weakref.finalize(reducer, communicators.release, own).atexit = False
        weakref.finalize(reducer, self._report.forget, number).atexit = False
        return reducer

    def _communicators(
        self, ranks: Sequence[int], size: int | None, nbuckets: int, place: Any, *, lent: Any = None
    ) -> tuple[list[Communicator], Callable[[int], None]]:
        """Return communicators for NBUCKETS buckets at PLACE, and a function that adds more.

        That function takes a number of buckets. LENT is the model's own ProcessGroup if that is
        enough until some are added.
        """
        most, overlaps = int(settings.effective("nccl_comm_num", 1)), settings.overlaps()
        if lent is not None:
            own = [communicators.Communicator([lent], place, overlaps=overlaps)]
        else:
            own = []

        def add(nbuckets: int) -> None:
            missing = max(1, min(most, nbuckets)) - len(own)
            if missing > 0:
                own.extend(self._pool.take(ranks, size, missing, place, overlaps=overlaps))

        if not own:
            add(nbuckets)
        return own, add

    def _asked(self) -> set[str]:
        """Return the fields of communication that are in effect, or are to be reported."""
        return {
            name
            for name in REDUCER_FIELDS
            if name in self._spec.strategy or settings.effective(name)
        }


def _step_limits(gradient_bytes: int) -> BucketLimits:
    return buckets.limits(gradient_bytes, _PADDLES_LIMITS)


def _bucket_bytes(sizes: Sequence[int], packed: Sequence[Sequence[int]]) -> list[int]:
    return [sum(sizes[index] for index in bucket) for bucket in packed]


def _are_equal(packed: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> bool:
    """Whether the buckets PACKED equal GROUPS, which number gradients from the other end."""
    last = sum(map(len, groups)) - 1
    return {frozenset(last - index for index in bucket) for bucket in packed} == set(
        map(frozenset, groups)
    )


def _caller() -> str:
    """Return the name of the module that makes the model, skipping frames of this package."""
    # `inspect` is slow.
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _announcing(no_sync: Callable[..., Any]) -> Callable[..., Any]:
    """Notify the model's reducer of each forward with gradients under NO_SYNC.

    Paddle notifies it of the others. As in Paddle, the forward counts, not the backward.
    """

    def disarm(model: Any, _inputs: Any) -> None:
        import paddle

        reducer = getattr(model, "_reducer", None)
        if isinstance(reducer, Reducer) and paddle.is_grad_enabled():
            reducer.disarm()

    @contextlib.contextmanager
    def announced(model: Any) -> Iterator[None]:
        # Other forwards cost what Paddle's do.
        hook = model.register_forward_pre_hook(disarm)
        try:
            with no_sync(model):
                yield
        finally:
            hook.remove()

    return announced


def _parameters(model: Any, paddle: Any) -> tuple[list[Any], set[int]]:
    """Return the parameters that DataParallel averages, and the ids of those with sparse gradients.

    As in Paddle, the weights of Embedding layers with `sparse=True` have sparse gradients.
    """
    by_id: dict[int, Any] = {}
    sparse = set()
    for layer in model.sublayers():
        for _, parameter in layer.named_parameters(include_sublayers=False):
            if parameter is None or id(parameter) in by_id or getattr(parameter, "no_sync", False):
                continue
            by_id[id(parameter)] = parameter
            if isinstance(layer, paddle.nn.layer.common.Embedding) and layer._sparse:
                sparse.add(id(parameter))
    return list(by_id.values()), sparse
