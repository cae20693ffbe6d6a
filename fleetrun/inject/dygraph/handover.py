"""Hands the gradients of a model over to Paddle's own reducer if only bucket sizes are requested.

Paddle's reducer is C++ and costs less per gradient; ours copies less and, over gloo, sums during
the backward. But Paddle's is wrong, or hangs, if a gradient is strided, missing on some rank, or
computed in several parts, which is unknown beforehand. So ours averages the first backwards and
inspects them. If all gradients were plain on all ranks, Paddle's reducer gets the next backwards.
Ours averages those after which ranks are compared, inspects them again, and takes the model back if
they are no longer plain.

In between, none of our code runs per gradient, as a call costs 1/200 of what Paddle does for a
small one. Only the matrices of layers that are not Paddle's are made contiguous before its reducer
sees them, and two sentinel gradients report their arrival. If a backward leaves gradients out (it
raised, or a layer was not used), this rank sends zeros: the other ranks wait for them, and Paddle's
reducer is unusable while it waits itself.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import border, buckets, settings
from ..communicators import release
from ..paddle_api import tensors
from . import backward, changes
from .reducer import Reducer, missing_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..buckets import BucketLimits

# The first backwards, which our reducer averages.
_LOOKS = 2
# What Paddle's reducer raises, by the kind of its error.
_ERRORS = (RuntimeError, ValueError)
_TWICE = "has been ready before"
_KEEP = "DataParallel(find_unused_parameters=True) keeps fleetrun's reducer."
_PADDLES_LAYERS = "paddle.nn."
# The mean gradient size in bytes above which ours costs less over gloo. A step with ours took 1.15
# times as long with gradients of 2 KB, 1.08 with 8 KB, 0.78 with 33 KB and 131 KB (two CPU ranks,
# Paddle 3.3.1). On devices copies are cheap, and Python costs the same.
_SMALL = 16 * 1024
_is_frozen = operator.attrgetter("stop_gradient")
# The field values with which Paddle's reducer does the same as without them. A strategy that has
# the defaults of fleet's asks for nothing.
_PADDLES_OWN: dict[str, tuple[object, ...]] = {
    "fuse_grad_size_in_num": (8, None),
    "fuse_grad_size_in_TFLOPS": (50, None),
    "nccl_comm_num": (1, None),
    # Fleet's default is for static graphs: in dynamic ones Paddle never waits.
    "sync_nccl_allreduce": (True, False, None),
    # With `auto` it has been decided by now.
    "use_hierarchical_allreduce": (False, None, "auto"),
    "fp16_allreduce": (False, None),
    "bf16_allreduce": (False, None),
    "gradient_merge": (False, None),
}
# The only communication fields that Paddle's reducer supports.
_SIZES = frozenset(("fuse_grad_size_in_MB", "last_comm_group_size_MB"))
_BYTES = _SIZES | {"fuse_all_reduce_ops"}


def pays(sizes: Sequence[int], *, is_synchronous: bool) -> bool:
    """Whether Paddle's reducer costs less than ours for gradients of SIZES, in bytes.

    IS_SYNCHRONOUS: the backend's collectives block, as gloo's do. Ours lets the backward go on
    meanwhile, unless it waits for each.

    >>> pays([4096, 128] * 150, is_synchronous=True), pays([1 << 20], is_synchronous=True)
    (True, False)
    """
    overlaps = is_synchronous and settings.overlaps()
    return not overlaps or sum(sizes) < _SMALL * len(sizes)


def suffices(
    asked: Iterable[str], packed: Sequence[object], *, has_levels: object, are_paddles: bool
) -> bool:
    """Whether Paddle's reducer can do what the communication fields ASKED request.

    PACKED are the resulting buckets; ARE_PADDLES: they are the same as without the fields.
    HAS_LEVELS: allreduces have two levels.
    """
    # Counts may leave the buckets as they are; one bucket has nothing to share communicators with.
    moot = (*buckets.COUNTS, *["nccl_comm_num"] * (len(packed) == 1)) if are_paddles else ()
    size = settings.effective("fuse_grad_size_in_MB")
    return (
        not has_levels
        and all(name in _BYTES or name in moot or _is_paddles_own(name) for name in asked)
        and (are_paddles or buckets.fuses())
        and (not isinstance(size, str) or size == "auto")
    )


def limits_bytes(asked: Iterable[str]) -> bool:
    """Whether the communication fields ASKED limit the bytes of buckets.

    >>> limits_bytes(["fuse_grad_size_in_num", "last_comm_group_size_MB"]), limits_bytes([])
    (True, False)
    """
    return not _SIZES.isdisjoint(asked)


def _is_paddles_own(name: str) -> bool:
    if name == "gradient_merge" and settings.effective_spec().merge_steps == 1:
        return True
    return name in _PADDLES_OWN and settings.effective(name) in _PADDLES_OWN[name]


# Gradients that cannot be inspected are not plain.
@border.watching("the inspection of gradients", otherwise=False)
def is_plain(parameters: Sequence[Any], computed: Sequence[int]) -> bool:
    """Whether a backward has computed each gradient of PARAMETERS once, dense and row-major.

    COMPUTED has the id of the parameter for each computed gradient.
    """
    # Neither the address nor the in-place version of a gradient shows an addition.
    return sorted(computed) == sorted(map(id, parameters)) and all(
        not gradient.is_selected_rows()
        and gradient.is_contiguous()
        and gradient.dtype == parameter.dtype
        for gradient, parameter in zip(tensors.gradients(parameters), parameters)
    )


class PaddlesReducer:
    """The reducer that Paddle's INIT_REDUCER makes for MODEL, with LIMITS (None: the model's)."""

    def __init__(
        self, model: Any, limits: BucketLimits | None, init_reducer: Callable[[Any], None]
    ) -> None:
        # The model holds the reducer that holds this.
        self._model = weakref.ref(model)
        self._limits = model.comm_buffer_size, model.last_comm_buffer_size
        if limits is not None:
            most = max(1, int(limits.most_bytes or model.comm_buffer_size))
            last = most if limits.last_bytes is None else max(1, int(limits.last_bytes))
            self._limits = most, last
        self._init_reducer = init_reducer
        self._made: Any = None
        self.prepare_for_backward: Callable[[Sequence[Any]], None] = _let_go
        # Makes gradients contiguous.
        self._hooks: list[Any] = []
        # The bytes of each bucket, in the order of sending.
        self.bucket_bytes: list[int] = []

    def make(self, trained: Sequence[Any]) -> bool:
        """Make it for the parameters TRAINED, in the order of the model; return whether Paddle can.

        Paddle 2.6.2 cannot if parameters are marked `no_sync`, as experts of one rank are. Both
        versions end the process if an operator has written a parameter, as quantisers do.
        """
        model: Any = self._model()
        if any(not (param.stop_gradient or param.is_leaf) for param in model.parameters()):
            return False
        ours, sizes = model._reducer, (model.comm_buffer_size, model.last_comm_buffer_size)
        model.comm_buffer_size, model.last_comm_buffer_size = self._limits
        try:
            self._init_reducer(model)
            self._made = model._reducer
        except RuntimeError:
            return False
        finally:
            model._reducer = ours
            model.comm_buffer_size, model.last_comm_buffer_size = sizes
        nbytes = list(map(tensors.nbytes, trained))
        self.bucket_bytes = [
            sum(nbytes[index] for index in group) for group in reversed(model.group_indices)
        ]
        for parameter in trained:
            # Their C++ hooks refer to the reducer without holding it, and may outlive the model.
            weakref.finalize(parameter, _let_go, self._made).atexit = False
        self._hooks = tensors.make_contiguous(_of_own_layers(model, trained))
        # A function in C.
        self.prepare_for_backward = self._made.prepare_for_backward
        return True

    def makes_contiguous(self, parameters: Sequence[Any]) -> set[int]:
        """Return the ids of those of PARAMETERS whose gradients it would make contiguous."""
        model: Any = self._model()
        return set(map(id, _of_own_layers(model, parameters)))

    def retire(self) -> None:
        """Leave later backwards to the other reducer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def complete(self, parameters: Sequence[Any]) -> list[Any]:
        """Send zeros for those of PARAMETERS that the backward has left out; return these."""
        import paddle

        before = tensors.gradients(parameters)
        frozen = [parameter for parameter in parameters if parameter.stop_gradient]
        for parameter in frozen:
            parameter.stop_gradient = False
        missing = []
        for parameter, gradient in zip(parameters, before):
            with backward.unobserved(), paddle.enable_grad():
                zero = (parameter * 0).sum()
                # Only a backward calls the reducer's hooks, which raise if the gradient was there.
                with contextlib.suppress(*_ERRORS):
                    paddle.autograd.backward([zero])
                    missing.append(parameter)
            if gradient is None:
                parameter.clear_gradient(False)
        for parameter in frozen:
            parameter.stop_gradient = True
        return missing


def _of_own_layers(model: Any, parameters: Iterable[Any]) -> list[Any]:
    """Return those of PARAMETERS that belong to layers of MODEL other than Paddle's.

    Paddle's own layers always use their weights in the same way, which was inspected.
    """
    paddles = {
        id(parameter)
        for layer in model.sublayers()
        if type(layer).__module__.startswith(_PADDLES_LAYERS)
        and getattr(layer.forward, "__func__", None) is type(layer).forward
        for parameter in layer.parameters(include_sublayers=False)
    }
    return [parameter for parameter in parameters if id(parameter) not in paddles]


def _let_go(_reducer: Any) -> None:
    """Do nothing: a finalizer keeps its arguments alive until it is called."""


class SparingReducer(Reducer):
    """Averages the first backwards and those that are checked; PADDLES averages the others.

    It sends all buckets when a backward has ended. Once PADDLES proves unfit, it acts like any
    other `Reducer`. OPTIONS are those of a `Reducer`.
    """

    def __init__(self, *args: Any, paddles: PaddlesReducer, **options: Any) -> None:
        self._paddles: PaddlesReducer | None = paddles
        # Its communicator is that of the model.
        self._has_models_own = True
        # The next backward that this one averages in any case.
        self._next_own = 0.0
        # Whether Paddle's averages the backward of the last forward, and the running one.
        self._is_paddles_turn = self._runs_paddles = False
        # Whether the running backward is the first since the last forward.
        self._follows_forward = False
        # Whether our last backward was plain, and all of Paddle's since the one before it.
        self._is_plain = self._were_plain = True
        # The ids of the parameters whose gradients the running and the last backward of ours
        # computed, and the hooks that record them.
        self._computed: list[int] = []
        self._order: list[int] = []
        self._hooks: list[Any] = []
        # The parameters with the first and the last gradient of a backward: they report its arrival
        # while Paddle's averages.
        self._sentinels: list[Any] = []
        super().__init__(*args, **options)

    @property
    def bytes_as_built(self) -> list[int] | None:
        """The bytes of each bucket if Paddle's reducer averages, else None."""
        return (self._paddles and self._paddles.bucket_bytes) or None

    @property
    def _reuses_memory(self) -> bool:
        return self._paddles is None and super()._reuses_memory

    def _watch(self, parameter: Any) -> None:
        if self._paddles is None:
            super()._watch(parameter)

    def _expect_last(self, parameter: Any) -> None:
        if self._paddles is None:
            super()._expect_last(parameter)

    def _add_communicators(self) -> None:
        if self._paddles is not None:
            return
        if self._has_models_own:
            # Buckets that are sent while a backward runs may come before a collective of that
            # backward (of synchronized batch norm) on one rank, and after it on another.
            self._has_models_own = False
            release(self._communicators)
            self._communicators.clear()
        super()._add_communicators()

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Reduce the backward of OUTPUTS, by Paddle's reducer if it is its turn.

        Raises RuntimeError if Paddle's reducer has not received all gradients of the one before.
        """
        # Not by `super`, which costs more than this does: it is done in each step.
        if self._changes != changes.count:
            self._look_at_changes()
        self._is_armed = self._is_awaited = True
        is_paddles_turn = False
        if self._paddles is not None and self.backwards + 1 < self._next_own:
            # From outputs without gradients, Paddle's would conclude that no parameter is used.
            for output in outputs:
                if not output.stop_gradient:
                    is_paddles_turn = True
                    break
        self._is_paddles_turn = is_paddles_turn
        backward.informed = None
        if is_paddles_turn and self._paddles is not None:
            prepare = self._paddles.prepare_for_backward
            try:
                prepare(outputs)
            except _ERRORS as error:
                self._take_back()
                raise missing_gradient() from error
            # If no other model listens, `begin` need not be called.
            backward.informed = backward.only
            self._runs_paddles = backward.only is not None
            self._nested = backward.nested
            self._arrivals.keys.clear()

    def share_parameters(self) -> None:
        """Prepare for another model that has some of the same parameters."""
        self._take_back()
        super().share_parameters()

    def _look_at_changes(self) -> None:
        super()._look_at_changes()
        self._choose()

    def _on_change(self) -> None:
        # Paddle's is made for the parameters that were trained, and for their dtypes then.
        if self._paddles is None:
            super()._on_change()
        else:
            self._take_back()

    def begin(self) -> None:
        """Get ready for a backward."""
        self._runs_paddles = False
        self._arrivals.keys.clear()
        # Under `no_sync` neither averages.
        if self._is_paddles_turn and self._is_armed:
            if self._is_awaited:
                self._runs_paddles = True
                self._nested = backward.nested
                return
            # Paddle's has averaged the only backward of a forward that it averages.
            self._take_back()
        self._follows_forward = self._is_awaited
        super().begin()
        if self._paddles is None:
            return
        trained = [parameter for parameter in self.parameters if not parameter.stop_gradient]
        if self._is_active:
            own = self._paddles.makes_contiguous(self.parameters)
            for parameter in trained:
                note = _noting(self._computed, id(parameter), takes_strided=id(parameter) in own)
                self._hooks.append(parameter.register_hook(note))
        self._hooks += tensors.keep_additions_right(trained)

    def finish(self) -> None:
        """Send everything and wait for it, unless Paddle's reducer has done so.

        Raises RuntimeError if the backward has left a gradient out.
        """
        if self._runs_paddles:
            arrived = len(self._arrivals.keys)
            if not arrived:
                # It was the backward of another model.
                backward.informed = backward.only
                self._runs_paddles = backward.only is not None
                self._nested = backward.nested
                return
            self._runs_paddles = self._is_awaited = False
            self.backwards += 1
            if backward.nested != self._nested:
                self._were_plain = False
            if arrived != len(self._sentinels):
                self._complete_paddles()
        elif self._paddles is None or not self._is_active:
            self._unhook()
            super().finish()
        else:
            computed = self._unhook()
            if computed:
                self._is_active = self._is_awaited = False
                self._is_plain = (
                    self._were_plain
                    and self._follows_forward
                    and backward.nested == self._nested
                    and is_plain(self.parameters, computed)
                )
                # What comes twice here is strided, or computed in parts.
                odd = [param.name for param in self.parameters if computed.count(id(param)) > 1]
                if odd and self.bytes_as_built:
                    self.doubt = (
                        "Paddle's reducer, which averaged before, misreads gradients that become"
                        f" strided, as that of {odd[0]} has: {_KEEP} "
                    )
                self._were_plain = True
                self._order = computed
                self.flush()

    def _unhook(self) -> list[int]:
        """Remove the hooks; return the gradients that they recorded."""
        for hook in self._hooks:
            hook.remove()
        computed, self._computed, self._hooks = self._computed, [], []
        return computed

    def _complete_paddles(self) -> None:
        """Let Paddle's reducer average everything in a backward that has left gradients out.

        Raises RuntimeError if any of them should have come.
        """
        if self._paddles is not None:
            missing = self._paddles.complete(self.parameters)
            self._take_back()
            trained = [parameter for parameter in missing if not parameter.stop_gradient]
            if trained:
                raise missing_gradient(trained[0])

    def abandon(self) -> None:
        """Drop the works under way.

        Raises RuntimeError if Paddle's reducer could not do what this one does.
        """
        self._unhook()
        if self._runs_paddles:
            self._runs_paddles = False
            if _TWICE in str(sys.exc_info()[1]):
                raise RuntimeError(
                    "fleetrun: a parameter got a second gradient in one backward, from a recomputed"
                    f" layer that is used twice, which Paddle's own reducer cannot average: {_KEEP}"
                )
            if self._arrivals.keys and self._paddles is not None:
                self._is_awaited = False
                self._paddles.complete(self.parameters)
        super().abandon()

    def _conclude(self) -> None:
        """Hand later backwards over to Paddle's reducer if this one was plain on all ranks."""
        if self._paddles is None:
            return
        is_made = self.bytes_as_built is not None
        if self._is_plain and not is_made:
            is_made = self._paddles.make(list(filter(tensors.is_trained, self._all)))
            # A hook costs 2,300 instructions in each step.
            sentinels = {self._order[0], self._order[-1]}
            self._sentinels = [param for param in self.parameters if id(param) in sentinels]
            for parameter in self._sentinels:
                self._arrivals.watch(parameter)
        # All ranks or none.
        if self._communicators[0].sum_integers([self._is_plain and is_made])[0] < self._nranks:
            self._take_back()
        self._choose()

    def _choose(self) -> None:
        """Find the next backward that this one averages."""
        # Paddle's assumes that every graph is like the first one it sees.
        is_able = self._paddles is not None and not any(map(_is_frozen, self.parameters))
        is_seen = is_able and self.backwards >= _LOOKS
        self._next_own = self._check.next_due(self.backwards) if is_seen else 0

    def _take_back(self) -> None:
        """Average all backwards from now on."""
        if self._paddles is None:
            return
        self._paddles.retire()
        self._paddles = None
        self._is_paddles_turn = False
        backward.informed = None
        self._next_own = 0
        # The others are not watched yet.
        tensors.keep_additions_right(self._sentinels)
        self._arrange()


def _noting(computed: list[int], key: int, *, takes_strided: bool) -> Callable[[Any], None]:
    def note(gradient: Any) -> None:
        computed.append(key)
        if not (takes_strided or gradient.is_contiguous()):
            # On devices, the next hook makes it contiguous. `is_plain` rejects what comes twice.
            computed.append(key)

    return note
