"""Communication fusion by Paddle's own reducer: fleetrun chooses the groups of gradients.

`DataParallel` gives its C++ reducer a list of groups of parameters, and each group is one bucket.
So any limit of a bucket is a choice of groups; Paddle sends them during the backward, and handles
sparse and unused gradients. Two of its faults are mended here: it reads strided gradients as if
they were row-major, and it knows nothing of parameters that are unfrozen or cast later. It averages
the first backward after a forward only, and silently leaves out what a nested backward computes, as
of a recomputed layer; so all gradients are averaged once more at the end of other backwards of a
forward. Backwards of the bare net stay local, as in Paddle: one rank alone may run them.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import buckets
from ..paddle_api import tensors
from . import backward
from .merge_round import SPARSE, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..buckets import BucketLimits

# The most sets of trained parameters and dtypes between which a script may change.
_MOST_SETS = 8
_PADDLES_LAYERS = "paddle.nn."
_CRASHES = (
    "fleetrun: Paddle crashes on sparse gradients in a backward under no_sync: create embeddings"
    " with sparse=False."
)
SPARSE_LOOKUP = (
    "the gradient of {} is sparse, and ranks average sparse gradients of"
    " nn.Embedding(sparse=True) layers only: look it up with sparse=False."
)
OUT_OF_STEP = (
    "fleetrun: a backward has raised after some of its gradients were sent, so this rank may be out"
    " of step with the others: start the training again."
)


def averaged(model: Any) -> list[Any]:
    """Return the parameters that DataParallel averages, in the order of MODEL."""
    by_id: dict[int, Any] = {}
    for layer in model.sublayers():
        for parameter in layer.parameters(include_sublayers=False):
            if not getattr(parameter, "no_sync", False):
                by_id.setdefault(id(parameter), parameter)
    return list(by_id.values())


def sparse_parameters(model: Any) -> set[int]:
    """Return the ids of the parameters of MODEL whose gradients Paddle's reducer takes as sparse.

    As Paddle does: the weights of Embedding layers with `sparse=True`.
    """
    embedding: Any = sys.modules["paddle.nn.layer.common"].Embedding
    return {
        id(layer.weight)
        for layer in model.sublayers()
        if isinstance(layer, embedding) and layer._sparse
    }


def choose_groups(
    parameters: Sequence[Any], sparse: set[int], limits: Callable[[int], BucketLimits]
) -> list[list[int]]:
    """Return the indexes of PARAMETERS in each group, in the order in which groups are sent.

    PARAMETERS are in the order of the model, SPARSE has ids of some; each of these is a group.
    LIMITS takes the bytes of all gradients.
    """
    order = range(len(parameters) - 1, -1, -1)
    sizes = [tensors.nbytes(parameters[index]) for index in order]
    kinds = [
        str(parameters[index].dtype) + f" {index}" * (id(parameters[index]) in sparse)
        for index in order
    ]
    packed = buckets.pack(sizes, kinds, limits(sum(sizes)))
    return [[order[place] for place in group] for group in packed]


def _of_scripts_layers(model: Any) -> set[int]:
    """Return the ids of parameters of layers that are not Paddle's, which may use them in any way.

    The gradient of a weight that is used transposed has the transposed layout.
    """
    return {
        id(parameter)
        for layer in model.sublayers()
        if not type(layer).__module__.startswith(_PADDLES_LAYERS)
        or getattr(layer.forward, "__func__", None) is not type(layer).forward
        for parameter in layer.parameters(include_sublayers=False)
    }


def _look(parameter: Any, strided: dict[int, bool], *, is_scripts: bool) -> Callable[[Any], Any]:
    """Return a hook that records in STRIDED whether the gradient of PARAMETER is, and makes it not.

    It counts as strided if its layer IS_SCRIPTS. A sparse one, which crashes Paddle's, is an error.
    """
    key, name = id(parameter), parameter.name

    def hook(gradient: Any) -> Any:
        if gradient.is_selected_rows():
            raise RuntimeError(f"fleetrun: {SPARSE_LOOKUP.format(name)}")
        is_strided = not gradient.is_contiguous()
        strided[key] = is_scripts or is_strided or strided.get(key, False)
        return gradient.contiguous() if is_strided else None

    return hook


class PaddlesReducer:
    """Paddle's reducers of one MODEL: one for each set of trained parameters and dtypes.

    LIMITS of a bucket depend on the bytes of all gradients. ON_MADE is called when another reducer
    begins to average. MUST_SYNC says whether the backward of a forward is to be averaged.
    """

    def __init__(
        self,
        model: Any,
        limits: Callable[[int], BucketLimits],
        *,
        on_made: Callable[[PaddlesReducer], None],
        must_sync: Callable[[Sequence[Any]], bool] | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._limits = limits
        self._on_made = on_made
        self._must_sync = must_sync
        self.parameters = averaged(model)
        self._sparse = sparse_parameters(model)
        # By the id of a parameter whose first gradient is still to come: a hook that looks at it.
        self._looking: dict[int, Any] = {}
        self._hooked: set[int] = set(self._sparse)
        # Whether the first gradient of a parameter was strided, by its id.
        self._strided: dict[int, bool] = {}
        self._made: dict[str, Any] = {}
        self._states: list[Any] = []
        self._current: Any = None
        # The bytes of each bucket, in the order of sending.
        self.bucket_bytes: list[int] = []
        # A forward awaits its backward; the gradients of the last one are to stay local.
        self._is_awaited = self._is_local = False
        # Parameters that the running backward has reached. Whether one has raised after it had.
        self._reached: set[int] = set()
        self._is_out_of_step = False
        self._passage = Passage()
        self._nested = 0
        self._watched: set[int] = set()
        self._choose(tensors.states(self.parameters))
        backward.listen(self)

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Average the backward of OUTPUTS; DataParallel calls it after each forward that syncs.

        Raises RuntimeError if a backward has raised before it could average its gradients, or if
        sparse ones are to be merged.
        """
        if self._is_out_of_step:
            raise RuntimeError(OUT_OF_STEP)
        self._passage.watch(outputs)
        states = tensors.states(self.parameters)
        if states != self._states:
            self._choose(states)
        self._is_local = self._must_sync is not None and not self._must_sync(self.parameters)
        if self._is_local:
            # Paddle's reducer crashes on them in a backward that it does not average.
            if self._trains_sparse():
                refuse(SPARSE)
            return
        # From outputs without a gradient Paddle's would conclude that no parameter is used.
        if self._current is None or all(output.stop_gradient for output in outputs):
            return
        self._current.prepare_for_backward(outputs)
        self._is_awaited = True

    def disarm(self, outputs: Sequence[Any]) -> None:
        """Leave the gradients of a forward under `no_sync`, with OUTPUTS, as they are on each rank.

        Raises RuntimeError if sparse ones are among them.
        """
        if self._trains_sparse():
            raise RuntimeError(_CRASHES)
        self._passage.watch(outputs)
        self._is_local = True

    # `backward` calls the next three around each outermost backward.

    def begin(self) -> None:
        """Get ready for a backward."""
        self._reached.clear()
        self._passage.is_seen = False
        self._nested = backward.nested

    def finish(self) -> None:
        """Average the gradients once more that Paddle's reducer may have left as they were.

        To average an average changes nothing.
        """
        if self._strided:
            self._look_no_more()
        if not (self._reached or self._passage.is_seen):
            return
        is_first, self._is_awaited = self._is_awaited, False
        is_left_out = self._passage.is_seen or self._passage.is_unknown
        if is_first:
            is_left_out = backward.nested != self._nested
        if self._current is None or self._is_local or not is_left_out:
            return
        import paddle
        from paddle.distributed.fleet.utils import hybrid_parallel_util

        model: Any = self._model()
        sum_all: Any = hybrid_parallel_util.fused_allreduce_gradients_with_group
        with paddle.no_grad(), tensors.made_at(self.parameters[0].place):
            # Not as patched for optimizers that average when they step.
            getattr(sum_all, "__wrapped__", sum_all)(self.parameters, model.group)

    def _look_no_more(self) -> None:
        """Make only those gradients contiguous that were strided at first: hooks cost time."""
        for parameter in self.parameters:
            if id(parameter) in self._strided:
                self._looking.pop(id(parameter)).remove()
                if self._strided.pop(id(parameter)):
                    tensors.make_contiguous([parameter])

    def abandon(self) -> None:
        """Remember that a backward of this model has raised."""
        self._is_out_of_step |= bool(self._reached)

    def _trains_sparse(self) -> bool:
        return any(
            id(param) in self._sparse and tensors.is_trained(param) for param in self.parameters
        )

    def _choose(self, states: list[Any]) -> None:
        """Let the reducer of the parameters with the STATES average, which is made if need be."""
        self._states = states
        self._current = None
        trained = list(filter(tensors.is_trained, self.parameters))
        if not trained:
            return
        key = str((states, [*map(id, trained)]))
        if key not in self._made:
            if len(self._made) >= _MOST_SETS:
                raise RuntimeError(
                    f"fleetrun: the script trains more than {_MOST_SETS} sets of parameters of one"
                    " DataParallel in turn, by stop_gradient or by casts: use the strategy without"
                    " communication fusion for this model."
                )
            self._made[key] = self._make(trained)
        self._current, self.bucket_bytes = self._made[key]
        self._on_made(self)

    def _make(self, trained: list[Any]) -> tuple[Any, list[int]]:
        """Return Paddle's reducer for TRAINED, and the bytes of its buckets."""
        core: Any = sys.modules["paddle.base.core"]
        model: Any = self._model()
        groups = choose_groups(trained, self._sparse, self._limits)
        # As Paddle's own `init_reducer` does.
        model.group_indices = groups[::-1]
        made = core.EagerReducer(
            trained,
            groups,
            [id(parameter) in self._sparse for parameter in trained],
            model.group.process_group,
            [model.last_comm_buffer_size, model.comm_buffer_size],
            model.find_unused_parameters,
        )
        for parameter in trained:
            # Its hooks in C++, which Paddle cannot remove, refer to it without holding it: the
            # argument of a finalizer that does nothing stays as long as the parameter.
            weakref.finalize(parameter, id, made).atexit = False
        scripts = _of_scripts_layers(model)
        for parameter in tensors.maybe_strided(trained):
            key = id(parameter)
            if key in self._hooked:
                continue
            self._hooked.add(key)
            look = _look(parameter, self._strided, is_scripts=key in scripts)
            self._looking[key] = parameter.register_hook(look)
        # Likely the first and the last gradient of a backward.
        for parameter in (trained[0], trained[-1]):
            if id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                # A function in C, which holds no model.
                reach = functools.partial(self._reached.add, id(parameter))
                tensors.on_gradient(parameter, reach)
        sizes = list(map(tensors.nbytes, trained))
        return made, [sum(sizes[index] for index in group) for group in groups]


class Passage:
    """Whether the running backward comes through a forward of the model, not of the bare net."""

    # Unknown: outputs are in the script's own objects, or in a program.
    is_seen = is_unknown = False

    def watch(self, outputs: Sequence[Any], *held: Any) -> None:
        """Watch the OUTPUTS of a forward; they hold the objects HELD until their backward."""
        watched = [output for output in outputs if not (output.stop_gradient or output.is_leaf)]
        self.is_unknown = not watched
        for output in watched:
            # `register_hook` would take 20 us for what is not needed here.
            output._register_grad_hook(functools.partial(self._see, *held))

    def _see(self, *_: Any) -> None:
        self.is_seen = True
