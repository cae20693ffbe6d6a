"""Hands the gradients of a model over to Paddle's own reducer, where only bytes are asked for.

Paddle's is C++ and costs less for each gradient, ours copies less and, over gloo, sums beside the
backward. And Paddle's is wrong, or waits for ever, where a gradient is strided, missing on some
rank, or computed in several goes, which nobody knows before. So ours averages the first backwards
and looks at them. Paddle's gets the next ones if all was plain on all ranks. Ours has those after
which ranks are compared, looks again, and takes back what is not plain any more.

In between, nothing of ours is called for each gradient, as a call costs a two-hundredth of what
Paddle does for a small one. Only matrices of layers that are not Paddle's are made contiguous
before its reducer sees them, and some gradients tell that they have come. If a backward has left
others out (it raised, or a layer was not used), this rank sends zeros: the other ranks wait for
them, and Paddle's reducer is unusable as long as it waits itself.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import border, settings
from ..communicators import release
from ..paddle_api import tensors
from . import backward
from .reducer import Reducer, missing_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .reducer import BucketLimits

# The first backwards, which are ours.
_LOOKS = 2
# The gradients that tell that a backward of Paddle's reducer has computed them: the first, the
# last, and some between.
_SENTINELS = 4
# What Paddle's reducer raises, by the kind of its error.
_ERRORS = (RuntimeError, ValueError)
_TWICE = "has been ready before"
_PADDLES_LAYERS = "paddle.nn."
# The mean size of gradients from which on ours costs less over gloo, in bytes. A step with ours
# took 1.15 times as long with gradients of 2 KB, 1.08 with 8 KB, 0.78 with 33 KB and 131 KB (two
# CPU ranks, Paddle 3.3.1). On devices copies cost little, and Python as much as ever.
_SMALL = 16 * 1024
_is_frozen = operator.attrgetter("stop_gradient")
# The values of fields that ask for what Paddle's reducer does without them.
_PADDLES_OWN: dict[str, tuple[object, ...]] = {
    "nccl_comm_num": (1, None),
    "sync_nccl_allreduce": (False, None),
    # With `auto` it has been decided by now.
    "use_hierarchical_allreduce": (False, None, "auto"),
    "fp16_allreduce": (False, None),
    "bf16_allreduce": (False, None),
    "gradient_merge": (False, None),
}
# What Paddle's reducer can do, too. Whatever else of communication is asked for, it cannot.
_BYTES = frozenset(("fuse_all_reduce_ops", "fuse_grad_size_in_MB", "last_comm_group_size_MB"))

# What may come to the same buckets as without it; and what one bucket leaves nothing of.
_COUNTS = ("fuse_grad_size_in_num", "fuse_grad_size_in_TFLOPS")
_ORDER = ("nccl_comm_num", "sync_nccl_allreduce")


def pays(sizes: Sequence[int], *, is_synchronous: bool) -> bool:
    """Whether Paddle's reducer costs less than ours for gradients of SIZES, in bytes.

    IS_SYNCHRONOUS: the backend's collectives block, as gloo's do.

    >>> pays([4096, 128] * 150, is_synchronous=True), pays([1 << 20], is_synchronous=True)
    (True, False)
    """
    return not is_synchronous or sum(sizes) < _SMALL * len(sizes)


def suffices(
    asked: Iterable[str],
    packed: Sequence[object],
    *,
    has_levels: object,
    are_paddles: bool,
) -> bool:
    """Whether Paddle's reducer can do all that the fields ASKED say of communication.

    PACKED are the buckets that they come to; ARE_PADDLES: as without them. HAS_LEVELS: allreduces
    have two levels.
    """
    moot = (*_COUNTS, *(_ORDER if len(packed) == 1 else ())) if are_paddles else ()
    size = settings.effective("fuse_grad_size_in_MB")
    return (
        not has_levels
        and all(
            name in _BYTES
            or name in moot
            or (name in _PADDLES_OWN and settings.effective(name) in _PADDLES_OWN[name])
            for name in asked
        )
        and (are_paddles or bool(settings.effective("fuse_all_reduce_ops", default=True)))
        and (not isinstance(size, str) or size == "auto")
    )


# Gradients that cannot be looked at are not plain.
@border.watching("the look at gradients", otherwise=False)
def is_plain(parameters: Sequence[Any], computed: Sequence[int]) -> bool:
    """Whether a backward has computed each gradient of PARAMETERS once, dense and row by row.

    COMPUTED has the id of a parameter for each gradient that it has computed.
    """
    # Neither the address nor the in-place version of a gradient tells that it was added to.
    return sorted(computed) == sorted(map(id, parameters)) and all(
        not gradient.is_selected_rows()
        and gradient.is_contiguous()
        and gradient.dtype == parameter.dtype
        for gradient, parameter in zip(tensors.gradients(parameters), parameters)
    )


class PaddlesReducer:
    """The reducer of Paddle that MODEL would have had, with LIMITS (None: the model's own).

    INIT_REDUCER makes it.
    """

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
        # What makes gradients contiguous.
        self._hooks: list[Any] = []
        # The bytes of each bucket, in the order in which they are sent; as built.
        self.bucket_bytes: list[int] = []

    def make(self, trained: Sequence[Any]) -> bool:
        """Make it for the parameters TRAINED, in the order of the model; return if Paddle can.

        That of 2.6.2 cannot where parameters are marked `no_sync`, as experts of one rank are. Both
        end the process where an operator has written a parameter, as quantisers write their scales.
        """
        model: Any = self._model()
        if any(not (each.stop_gradient or each.is_leaf) for each in model.parameters()):
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
        nbytes = [each.size * each.element_size() for each in trained]
        self.bucket_bytes = [
            sum(nbytes[index] for index in group) for group in reversed(model.group_indices)
        ]
        for each in trained:
            # Their hooks in C++ refer to it without holding it, and they may outlive the model.
            weakref.finalize(each, _let_go, self._made).atexit = False
        self._hooks = tensors.make_contiguous(_of_own_layers(model, trained))
        # A function in C.
        self.prepare_for_backward = self._made.prepare_for_backward
        return True

    def retire(self) -> None:
        """Leave all that is to come to another reducer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def complete(self, parameters: Sequence[Any]) -> list[Any]:
        """Let it average those of PARAMETERS, too, that its backward has left out; return these."""
        import paddle

        before = tensors.gradients(parameters)
        frozen = [each for each in parameters if each.stop_gradient]
        for each in frozen:
            each.stop_gradient = False
        missing = []
        for each, gradient in zip(parameters, before):
            with backward.unobserved(), paddle.enable_grad():
                zero = (each * 0).sum()
                # It goes by its own hooks, which only a backward calls. It raises where the
                # gradient was there.
                with contextlib.suppress(*_ERRORS):
                    paddle.autograd.backward([zero])
                    missing.append(each)
            if gradient is None:
                each.clear_gradient(False)
        for each in frozen:
            each.stop_gradient = True
        return missing


def _of_own_layers(model: Any, parameters: Iterable[Any]) -> list[Any]:
    """Return those of PARAMETERS that layers of MODEL have which are not Paddle's.

    Paddle's own use their weights in one way, whose gradient was looked at.
    """
    paddles = {
        id(parameter)
        for layer in model.sublayers()
        if type(layer).__module__.startswith(_PADDLES_LAYERS)
        and getattr(layer.forward, "__func__", None) is type(layer).forward
        for parameter in layer.parameters(include_sublayers=False)
    }
    return [each for each in parameters if id(each) not in paddles]


def _let_go(_reducer: Any) -> None:
    """Do nothing: the arguments of a finalizer live until it is called."""


class SparingReducer(Reducer):
    """Averages the first backwards and those that are checked, and lets PADDLES have the others.

    It sends all buckets when a backward has ended, unless PADDLES has turned out not to do: from
    then on it is as any other. OPTIONS are those of a `Reducer`.
    """

    def __init__(self, *args: Any, paddles: PaddlesReducer, **options: Any) -> None:
        self._paddles: PaddlesReducer | None = paddles
        # Its communicator is that of the model.
        self._has_models_own = True
        # The next backward that this one averages, whatever Paddle's could do.
        self._next_own = 0.0
        # Whether Paddle's has the backward of the last forward; and the one that runs.
        self._is_paddles_turn = self._runs_paddles = False
        # Whether the backward that runs is the first one since the last forward.
        self._follows_forward = False
        # Whether the last backward of ours was plain, and all of Paddle's since the one before.
        self._is_plain = self._were_plain = True
        # The ids of the parameters whose gradients a backward of ours computes, and what tells.
        self._computed: list[int] = []
        self._order: list[int] = []
        self._hooks: list[Any] = []
        # How many gradients tell of a backward of Paddle's.
        self._sentinels = 0
        super().__init__(*args, **options)
        self._check.replaces_paddles = True

    @property
    def bytes_as_built(self) -> list[int] | None:
        """The bytes of each bucket of the reducer of Paddle that averages; None: this one does."""
        return (self._paddles and self._paddles.bucket_bytes) or None

    @property
    def _reuses_memory(self) -> bool:
        return self._paddles is None and super()._reuses_memory

    def _watch(self, parameter: Any) -> None:
        if self._paddles is None:
            super()._watch(parameter)
        else:
            tensors.keep_additions_right(parameter)

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
        """Reduce the backward of OUTPUTS; let Paddle's reducer have it if it is its turn.

        Raises RuntimeError if Paddle's reducer has not got all gradients of the one before.
        """
        super().prepare_for_backward(outputs)
        # Of outputs without gradients, too: that nothing is used.
        self._is_paddles_turn = self.backwards + 1 < self._next_own and not all(
            map(_is_frozen, outputs)
        )
        if self._is_paddles_turn and self._paddles is not None:
            try:
                self._paddles.prepare_for_backward(outputs)
            except _ERRORS as error:
                self._take_back()
                raise missing_gradient() from error

    def share_parameters(self) -> None:
        """Prepare for another model that has some of the same parameters."""
        self._take_back()
        super().share_parameters()

    def _look_at_changes(self) -> None:
        super()._look_at_changes()
        self._choose()

    def _on_change(self) -> None:
        # Paddle's is made for the parameters that were trained, and the dtypes that they had.
        if self._paddles is None:
            super()._on_change()
        else:
            self._take_back()

    def begin(self) -> None:
        """Get ready for a backward."""
        self._arrivals.keys.clear()
        # Under `no_sync` nobody averages.
        if self._is_paddles_turn and self._is_armed:
            if self._is_awaited:
                self._runs_paddles = True
                self._nested = backward.nested_count()
                return
            # Paddle's has averaged the only backward of a forward that it averages.
            self._take_back()
        self._follows_forward = self._is_awaited
        super().begin()
        if self._is_active and self._paddles is not None:
            self._hooks = [
                each.register_hook(_noting(self._computed, id(each)))
                for each in self.parameters
                if not each.stop_gradient
            ]

    def finish(self) -> None:
        """Send everything and wait for it, unless Paddle's reducer has."""
        if self._runs_paddles:
            self._runs_paddles = False
            # Without any it was that of another model.
            if self._arrivals.keys:
                self._finish_paddles()
        elif self._paddles is None or not self._is_active:
            super().finish()
        else:
            computed = self._unhook()
            if computed:
                self._is_active = self._is_awaited = False
                self._is_plain = (
                    self._were_plain
                    and self._follows_forward
                    and backward.nested_count() == self._nested
                    and is_plain(self.parameters, computed)
                )
                self._were_plain = True
                self._order = computed
                self.flush()

    def _unhook(self) -> list[int]:
        """Return what a backward of ours has computed, which has ended."""
        for hook in self._hooks:
            hook.remove()
        computed, self._computed, self._hooks = self._computed, [], []
        return computed

    def _finish_paddles(self) -> None:
        """See that Paddle's reducer has averaged everything in a backward that has ended.

        Raises RuntimeError if the backward has left a gradient out, as far as it is known by now.
        """
        self._is_awaited = False
        self.backwards += 1
        if backward.nested_count() != self._nested:
            self._were_plain = False
        if len(self._arrivals.keys) != self._sentinels and self._paddles is not None:
            missing = self._paddles.complete(self.parameters)
            self._take_back()
            trained = [each for each in missing if not each.stop_gradient]
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
                message = (
                    "fleetrun: a parameter got a second gradient in one backward, of a recomputed"
                    " layer that is used twice, which Paddle's own reducer cannot average:"
                    " nccl_comm_num: 2 keeps fleetrun's."
                )
                raise RuntimeError(message)
            if self._arrivals.keys and self._paddles is not None:
                self._is_awaited = False
                self._paddles.complete(self.parameters)
        super().abandon()

    def _conclude(self) -> None:
        """Let Paddle's reducer have other backwards if this one was plain on all ranks."""
        if self._paddles is None:
            return
        is_made = self.bytes_as_built is not None
        if self._is_plain and not is_made:
            is_made = self._paddles.make([each for each in self._all if tensors.is_trained(each)])
            several = {*self._order[:: max(1, len(self._order) // _SENTINELS)], self._order[-1]}
            self._sentinels = len(several)
            for each in self.parameters:
                if id(each) in several:
                    self._arrivals.watch(each)
        # All ranks or none.
        if self._communicators[0].sum_integers([self._is_plain and is_made])[0] < self._nranks:
            self._take_back()
        self._choose()

    def _choose(self) -> None:
        """Find the next backward that this one averages."""
        # Paddle's believes the first graph that it sees.
        is_able = self._paddles is not None and not any(map(_is_frozen, self.parameters))
        is_seen = is_able and self.backwards >= _LOOKS
        self._next_own = self._check.next_due(self.backwards) if is_seen else 0

    def _take_back(self) -> None:
        """Average all backwards from now on."""
        if self._paddles is None:
            return
        self._paddles.retire()
        self._paddles = None
        self._is_paddles_turn = self._check.replaces_paddles = False
        self._next_own = 0
        self._arrange()


def _noting(computed: list[int], key: int) -> Callable[[Any], None]:
    def note(_gradient: Any) -> None:
        computed.append(key)

    return note
