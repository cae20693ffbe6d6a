"""Hands the gradients of a model over to Paddle's own reducer, where only bytes are asked for.

Paddle's is C++ and costs less for each gradient, ours copies less and, over gloo, sums beside the
backward. And Paddle's is wrong, or waits for ever, where a gradient is strided, missing on some
rank, or computed in several goes, which nobody knows before. So ours averages the first backwards
and looks at them. Paddle's gets the next ones if all was plain on all ranks. Ours has those after
which ranks are compared, looks again, and takes back what is not plain any more.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from .. import settings
from ..paddle_api import tensors
from . import backward
from .reducer import Reducer, weakly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .reducer import BucketLimits

# The first backwards, which are ours.
_LOOKS = 2
# The mean size of gradients from which on ours costs less over gloo, in bytes. A step with ours
# took 1.15 times as long with gradients of 2 KB, 1.08 with 8 KB, 0.78 with 33 KB and 131 KB (two
# CPU ranks, Paddle 3.3.1). On devices copies cost little, and Python as much as ever.
_SMALL = 16 * 1024
# What Paddle's reducer can do, too. Whatever else of communication is asked for, it cannot.
_BYTES = frozenset(("fuse_all_reduce_ops", "fuse_grad_size_in_MB", "last_comm_group_size_MB"))


def pays(sizes: Sequence[int], *, is_synchronous: bool) -> bool:
    """Whether Paddle's reducer costs less than ours for gradients of SIZES, in bytes.

    IS_SYNCHRONOUS: the backend's collectives block, as gloo's do.

    >>> pays([4096, 128] * 150, is_synchronous=True), pays([1 << 20], is_synchronous=True)
    (True, False)
    """
    return not is_synchronous or sum(sizes) < _SMALL * len(sizes)


def suffices(asked: Iterable[str]) -> bool:
    """Whether Paddle's reducer can do all that the fields ASKED say of communication."""
    size = settings.effective("fuse_grad_size_in_MB")
    return (
        _BYTES.issuperset(asked)
        and bool(settings.effective("fuse_all_reduce_ops", default=True))
        and (not isinstance(size, str) or size == "auto")
    )


class Look:
    """Looks at what the next backward does to the gradients of PARAMETERS; `end` ends that.

    FOLLOWS_FORWARD: there was no other backward since the last forward.
    """

    def __init__(self, parameters: Sequence[Any], *, follows_forward: bool) -> None:
        self._parameters = parameters
        self._follows_forward = follows_forward
        self._counts = [0] * len(parameters)
        self._nested = backward.nested_count()
        # Neither the address nor the in-place version of a gradient tells that it was added to.
        self._hooks = [
            parameter.register_hook(functools.partial(_count, self._counts, place))
            for place, parameter in enumerate(parameters)
        ]

    def end(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def has_gradients(self) -> bool:
        """Whether the backward has computed any of the gradients."""
        return any(self._counts)

    def is_plain(self) -> bool:
        """Whether it has computed each of them, once, densely and in row-major order."""
        return (
            self._follows_forward
            and all(count == 1 for count in self._counts)
            and backward.nested_count() == self._nested
            and all(
                not gradient.is_selected_rows()
                and gradient.is_contiguous()
                and gradient.dtype == parameter.dtype
                for gradient, parameter in zip(
                    tensors.gradients(self._parameters), self._parameters
                )
            )
        )


def _count(counts: list[int], place: int, _gradient: Any) -> None:
    counts[place] += 1


class PaddlesReducer:
    """The reducer of Paddle that MODEL would have had, with LIMITS; made by INIT_REDUCER."""

    def __init__(
        self, model: Any, limits: BucketLimits, init_reducer: Callable[[Any], None]
    ) -> None:
        # The model holds the reducer that holds this.
        self._model = weakref.ref(model)
        most = max(1, int(limits.most_bytes or model.comm_buffer_size))
        last = most if limits.last_bytes is None else max(1, int(limits.last_bytes))
        self._limits = most, last
        self._init_reducer = init_reducer
        self._made: Any = None
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
        return True

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Let it average the backward of OUTPUTS."""
        self._made.prepare_for_backward(outputs)


def _let_go(_reducer: Any) -> None:
    """Do nothing: the arguments of a finalizer live until it is called."""


class SparingReducer(Reducer):
    """Averages the first backwards and those that are checked, and lets PADDLES have the others.

    It hears of no gradient, and sends all buckets when a backward has ended, unless PADDLES has
    turned out not to do: from then on it is as any other. OPTIONS are those of a `Reducer`.
    """

    def __init__(self, *args: Any, paddles: PaddlesReducer, **options: Any) -> None:
        self._paddles: PaddlesReducer | None = paddles
        self._look: Look | None = None
        # Whether Paddle's has the backward of the last forward; and the one that runs.
        self._is_paddles_turn = self._runs_paddles = False
        # The backward that runs has come to this model: it may be that of another one.
        self._is_reached = False
        # The last backward that was looked at.
        self._is_plain = False
        super().__init__(*args, **options)

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

    def _expect_last(self, parameter: Any) -> None:
        if self._paddles is None:
            super()._expect_last(parameter)

    def on_forward(self, *, syncs: bool) -> None:
        """Choose who reduces the backward of this forward if it SYNCS."""
        super().on_forward(syncs=syncs)
        if syncs:
            self._is_paddles_turn = (
                self.bytes_as_built is not None
                and self.backwards >= _LOOKS
                and not self._check.is_due(self.backwards)
            )

    def _note_reached(self) -> None:
        self._is_reached = True

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Let Paddle's reducer have the backward of OUTPUTS, if it is its turn."""
        if self._is_paddles_turn and self._paddles is not None:
            self._paddles.prepare_for_backward(outputs)

    def share_parameters(self) -> None:
        """Prepare for another model that has some of the same parameters."""
        self._take_back()
        super().share_parameters()

    def _on_cast(self) -> None:
        # Paddle's is made for the dtypes that parameters had.
        if self._paddles is None:
            super()._on_cast()
        else:
            self._take_back()

    def begin(self) -> None:
        """Get ready for a backward."""
        if any(map(tensors.is_trained, self._frozen)):
            self._take_back()
        # Under `no_sync` nobody averages.
        if self._is_paddles_turn and self._is_armed:
            if self._is_awaited:
                self._runs_paddles = True
                self._is_reached = False
                return
            # Paddle's has averaged the only backward of a forward that it averages.
            self._take_back()
        was_awaited = self._is_awaited
        super().begin()
        if self._paddles is not None and self._is_active:
            self._look = Look(self.parameters, follows_forward=was_awaited)

    def finish(self) -> None:
        """Send everything and wait for it, unless Paddle's reducer has."""
        look, self._look = self._look, None
        if self._runs_paddles:
            self._runs_paddles = False
            if self._is_reached:
                self._is_awaited = False
                self.backwards += 1
        elif look is None:
            super().finish()
        else:
            look.end()
            if look.has_gradients():
                self._is_active = self._is_awaited = False
                self._is_plain = look.is_plain()
                self.flush()

    def abandon(self) -> None:
        """Drop the works under way."""
        self._runs_paddles = False
        if self._look is not None:
            self._look.end()
            self._look = None
        super().abandon()

    def _conclude(self) -> None:
        """Let Paddle's reducer have other backwards if this one was plain on all ranks."""
        if self._paddles is None:
            return
        is_made = self.bytes_as_built is not None
        if self._is_plain and not is_made:
            is_made = self._paddles.make([each for each in self._all if tensors.is_trained(each)])
            tensors.on_gradient(self.parameters[0], weakly(self._note_reached))
        # All ranks or none.
        if self._communicators[0].sum_integers([self._is_plain and is_made])[0] < self._nranks:
            self._take_back()

    def _take_back(self) -> None:
        """Average all backwards from now on."""
        if self._paddles is None:
            return
        self._paddles = None
        self._is_paddles_turn = False
        self._arrange()
