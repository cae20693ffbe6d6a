"""Chooses who averages the gradients of each `paddle.DataParallel`, which fleet's models are, too.

Paddle's own reducer does, with groups of fleetrun's choice, unless the strategy asks for what it
cannot do and the model allows that.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import buckets, communicators, paddle_api, settings
from ..buckets import BucketLimits
from ..import_hooks import in_place_of
from ..paddle_api import private_names, tensors
from . import compression
from .paddles_reducer import PaddlesReducer, averaged, choose_groups, sparse_parameters
from .reducer import Reducer, ReducerSetup
from .reducer_report import HIERARCHY, UNUSED, ReducerReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from ..evidence import Evidence
    from ..spec import StrategySpec

# The fields of which each model is told.
REDUCER_FIELDS = (
    *buckets.FUSION,
    "nccl_comm_num",
    "sync_nccl_allreduce",
    HIERARCHY[0],
    "gradient_merge",
    *compression.DTYPES,
    UNUSED,
)
_PACKAGE = __name__.rpartition(".dygraph.")[0]
# The arguments of DataParallel that set a field.
_ARGUMENTS = {
    "comm_buffer_size": "fuse_grad_size_in_MB",
    "last_comm_buffer_size": "last_comm_group_size_MB",
    UNUSED: UNUSED,
}
# The mean gradient size in bytes above which our reducer costs less over gloo, where it lets the
# backward go on while Paddle's waits. A step with ours took 1.3 to 1.5 times as long with gradients
# of 2 KB, 0.9 with large ones (two CPU ranks, Paddle 3.3.1).
_SMALL = 16 * 1024
_SHARED = "several models share parameters"


class Reducers:
    """The reducers of all DataParallel models of this process.

    MUST_SYNC says of some parameters whether the backward of a forward is to be averaged; None:
    always.
    """

    def __init__(
        self,
        spec: StrategySpec,
        proof: Evidence,
        must_sync: Callable[[Sequence[Any]], bool] | None,
    ) -> None:
        self._spec = spec
        self._must_sync = must_sync
        self._report = ReducerReport(spec, proof)
        # The limits of each model's buckets; the models in the order of creation.
        self._limits: weakref.WeakKeyDictionary[Any, Callable[[int], BucketLimits]] = (
            weakref.WeakKeyDictionary()
        )
        # Whether the script itself limits the last bucket of the model that is being made.
        self._script_limits_last = False

    def patch(self, module: ModuleType) -> None:
        """Patch the module `paddle.distributed.parallel`."""
        cls = module.DataParallel
        signature = inspect.signature(cls.__init__)
        in_place_of(cls, "__init__")(functools.partial(self._make_model, signature))
        in_place_of(cls, "init_reducer")(self._init_reducer)
        in_place_of(cls, "forward")(_forward)

    def _make_model(
        self, signature: inspect.Signature, init: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Call INIT of a model; record what the script passes to it."""
        # Values from fleet come from its strategy, and were recorded when they were set.
        is_paddles = _caller().startswith("paddle.")
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        for argument, name in _ARGUMENTS.items():
            if argument in given and name in self._spec.strategy and not is_paddles:
                settings.set_by_script(name, given[argument])
        self._script_limits_last = "last_comm_buffer_size" in given and not is_paddles
        if UNUSED in self._spec.strategy:
            given[UNUSED] = settings.effective(UNUSED)
        init(*bound.args, **bound.kwargs)

    def _init_reducer(self, init_reducer: Callable[..., None], model: Any) -> None:
        """Give MODEL a reducer, or call INIT_REDUCER."""
        parameters = averaged(model)
        trained = list(filter(tensors.is_trained, parameters))
        # Without a trained parameter Paddle raises its own error.
        if not trained or not paddle_api.has(private_names.REDUCER):
            init_reducer(model)
            return
        sparse, shared = sparse_parameters(model), self._sharing(parameters)
        limits = self._limits[model] = self._limits_of(model)
        groups = choose_groups(trained, sparse, limits)
        # As Paddle's own `init_reducer` does.
        model.group_indices = groups[::-1]
        sizes = list(map(tensors.nbytes, trained))
        self._report.paddles_bytes[model] = self._paddles_bytes(model, trained, sparse)
        ranks, place = list(model.group.ranks), trained[0].place
        for other in shared:
            if isinstance(other._reducer, Reducer):
                self._hand_over(other, _SHARED)
        size = self._group_size(ranks)
        # Paddle's knows nothing of merged gradients that earlier micro-steps alone have computed.
        needs_ours = self._must_sync is not None or self._needs_ours(len(groups), sizes, size)
        obstacle = "the model has sparse gradients" if sparse else _SHARED if shared else ""
        if obstacle or not needs_ours:
            self._hand_over(model, obstacle if needs_ours else "")
            return
        number = max(1, min(int(settings.effective("nccl_comm_num", 1)), len(groups)))
        several = communicators.take(ranks, size, number)
        setup = ReducerSetup(
            limits,
            several,
            communicators.split_ranks(ranks, size) if size else None,
            settings.overlaps(),
            compression.choose(several[0], ranks, communicators.global_rank(), place),
        )
        # The attribute in which Paddle keeps its own.
        model._reducer = Reducer(
            model,
            setup,
            on_reduced=functools.partial(self._report.uses, weakref.ref(model)),
            must_sync=self._must_sync,
        )

    def _limits_of(self, model: Any) -> Callable[[int], BucketLimits]:
        # No closure may hold the model: it holds the reducer, and both must go together.
        nbytes = model.comm_buffer_size
        last_bytes = model.last_comm_buffer_size if self._script_limits_last else None
        # The script's limits of this model apply where the strategy sets none.
        return lambda total: buckets.limits(total, BucketLimits(nbytes, last_bytes=last_bytes))

    def _group_size(self, ranks: Sequence[int]) -> int | None:
        """Return how many of RANKS sum among themselves first; None: all sum at once."""
        if not settings.effective(HIERARCHY[0]):
            return None
        topology = self._spec.topology
        together = topology.ranks_per_group or topology.ranks_per_node
        size = int(settings.effective(HIERARCHY[1]) or together)
        return size if 1 < size < len(ranks) else None

    def _needs_ours(self, groups: int, sizes: Sequence[int], group_size: int | None) -> bool:
        """Whether the strategy asks for what Paddle's reducer cannot do with so many GROUPS.

        SIZES are the bytes of gradients, GROUP_SIZE is that of ranks.
        """
        if group_size is not None or compression.asked():
            return True
        if groups == 1:
            return False
        overlaps = communicators.is_synchronous() and settings.overlaps()
        return int(settings.effective("nccl_comm_num", 1)) > 1 or (
            overlaps and sum(sizes) >= _SMALL * len(sizes)
        )

    def _sharing(self, parameters: Sequence[Any]) -> list[Any]:
        """Return the models with a reducer of ours or chosen groups that have any of PARAMETERS."""
        own = set(map(id, parameters))
        return [
            model
            for model in self._limits
            if not own.isdisjoint(map(id, getattr(model._reducer, "parameters", ())))
        ]

    def _hand_over(self, model: Any, why: str) -> None:
        """Let Paddle's reducer average the gradients of MODEL; WHY, if the strategy needs ours."""
        if why:
            self._report.why_paddles = f"Paddle's own reducer averages here: {why}"
        model._reducer = PaddlesReducer(
            model,
            self._limits[model],
            on_made=functools.partial(self._report.uses, weakref.ref(model)),
            must_sync=self._must_sync,
        )

    def _paddles_bytes(self, model: Any, trained: list[Any], sparse: set[int]) -> list[int]:
        """Return the bytes of the buckets that Paddle builds from TRAINED without the strategy."""
        core: Any = sys.modules["paddle.base.core"]
        name, last = "last_comm_group_size_MB", model.last_comm_buffer_size
        if self._spec.strategy.get(name) is not None and not settings.script_wins(name):
            # The strategy has replaced the model's argument; this is its default.
            last = buckets.MEBIBYTE
        groups = core.eager_assign_group_by_size(
            trained,
            [id(parameter) in sparse for parameter in trained],
            [last, model.comm_buffer_size],
        )
        sizes = list(map(tensors.nbytes, trained))
        return [sum(sizes[index] for index in group) for group in groups]


def _caller() -> str:
    """Return the name of the module that makes the model, skipping frames of this package."""
    # `inspect` is slow.
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _forward(forward: Callable[..., Any], model: Any, /, *inputs: Any, **options: Any) -> Any:
    """Notify the model's reducer of a forward with gradients under `no_sync`.

    Paddle notifies it of the others. As in Paddle, the forward counts, not the backward.
    """
    result = forward(model, *inputs, **options)
    if not model.grad_need_sync and sys.modules["paddle"].is_grad_enabled():
        reducer = getattr(model, "_reducer", None)
        if isinstance(reducer, (Reducer, PaddlesReducer)):
            reducer.disarm([*model._find_tensor(result)])
    return result
