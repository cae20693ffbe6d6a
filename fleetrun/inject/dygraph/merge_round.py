"""The gradients that one optimizer merges from several micro-steps into one update.

A step that is not the last of a round adds the gradients to sums beside `parameter.grad`. The first
backward of the last micro-step finds these sums in the gradients, so its reduction averages the
whole round. They are divided by the number of steps when it has ended.

Gradients must come to a step as the last backward has left them, or cleared: everything else that a
script may do to them (noise, signs, several losses combined) is refused at the first step that is
not the last. So what a cleared gradient has held does not count.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from .. import checksums, settings, updates
from ..paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CHANGED = (
    "the script changes gradients by hand between a backward and a step, or combines those of"
    " several backwards (Paddle's clipping and GradScaler may change them)"
)
NO_BACKWARD = "the script steps without a backward, or with gradients of paddle.grad"
NOT_CLEARED = "the script does not clear the gradients of the step before"
CLEARED_LAST = (
    "the script clears gradients of an update's last micro-step, or freezes what they belong to"
    " during its backward, and steps without them"
)
FROZEN = "the script freezes in an update's last micro-step what it has trained in an earlier one"
NOT_AVERAGED = "a DataParallel of an earlier micro-step has no forward in the last one of an update"
SPARSE = "a gradient is sparse: create embeddings with sparse=False"
SHARED = "two optimizers of the same parameters step in one round, or one of them steps the other"
OTHER_WEIGHTS = (
    "the script writes weights between the backwards of one update, or between a backward and its"
    " step, as SAM or an optimizer of its own do (if it clips them after each step: clip them"
    " before the first one, too)"
)


def refuse(reason: str) -> None:
    """Raise RuntimeError: the gradients cannot be merged for REASON."""
    raise RuntimeError(
        f"fleetrun: gradient_merge: {reason}: this cannot be merged; use the strategy without"
        " gradient_merge."
    )


class MergeRound:
    """The gradients that OPTIMIZER has merged since its last update."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        # As `adopt` sets them.
        self.steps, self.averages = 1, True
        # Micro-steps since the last update; and the sums of their gradients, by parameter.
        self.merged = 0
        self._kept: dict[int, Any] = {}
        # The states of gradients that nobody has cleared since, as the last backward left them; and
        # of those that the last step has used.
        self._left: dict[int, tuple[int, ...]] = {}
        self._used: set[int] = set()
        # The ids of all parameters, and of those whose gradients have arrived in the last backward,
        # and ever.
        self.ids: set[int] = set()
        self._arrived: set[int] = set()
        self._trained: set[int] = set()
        self._hooked: set[int] = set()
        # In the last micro-step: the ids of parameters whose gradients contain the kept sums,
        # whether all are divided, or clipped, and whether the script knows their norm.
        self._put_back: set[int] = set()
        self._is_divided = self._has_told_norm = self._is_clipped = False
        # The ids of parameters that models of DataParallel average, and do so in this micro-step.
        self.parallel: set[int] = set()
        self.averaging: set[int] = set()
        # The number of this round, and the checksums of weights at its first backward.
        self._number = 1
        self._weights: dict[int, int] = {}
        # A backward or an update runs: what it clears is not cleared by the script.
        self.is_updating = self._is_in_backward = False
        # For schedulers: the steps since a scheduler's last step, and whether the last one updated.
        self.steps_unscheduled = 0
        self.is_updated = True
        self._watch(self.parameters)

    def adopt(self) -> None:
        """Merge as the settings in effect say."""
        self.steps, self.averages = settings.merging()

    @property
    def parameters(self) -> list[Any]:
        """The parameters whose gradients are merged."""
        optimizer = self.optimizer()
        return [] if optimizer is None else updates.parameters_of(optimizer)

    @property
    def is_last(self) -> bool:
        """Whether the next step updates the parameters."""
        return self.merged + 1 >= self.steps

    def _check_weights(self, parameters: Sequence[Any]) -> None:
        """Raise RuntimeError if trained weights have changed since the round's first backward.

        Between two backwards a script may change them for a while, as where it evaluates averages.
        """
        if not updates.is_due("auto", self._number):
            return
        trained = [parameter for parameter in parameters if id(parameter) in self._trained]
        sums = dict(zip(map(id, trained), checksums.of_values(trained)))
        if any(self._weights.get(key, total) != total for key, total in sums.items()):
            refuse(OTHER_WEIGHTS)
        self._weights = sums

    def forget_weights(self) -> None:
        """Forget the weights, which may change before the round's first gradients."""
        if not self.merged:
            self._weights = {}

    def _watch(self, parameters: Iterable[Any]) -> None:
        """Record the gradients of PARAMETERS that are trained by now."""
        self.ids = set(map(id, parameters))
        for parameter in parameters:
            if id(parameter) not in self._hooked and tensors.is_trained(parameter):
                self._hooked.add(id(parameter))
                # A C function costs less than one of ours; and it must not hold this object.
                tensors.on_gradient(parameter, functools.partial(self._arrived.add, id(parameter)))

    def begin(self) -> None:
        """Prepare the gradients for a backward."""
        parameters = self.parameters
        self._watch(parameters)
        self._is_in_backward = True
        # Those that the script has set to zero without Paddle's methods are cleared, too.
        used = [param for param in parameters if id(param) in self._used]
        self._used = {id(param) for param in used if not is_zero(gradient_of(param))}
        self._arrived.clear()
        if self.is_last and self.merged:
            self._scale(parameters, undo=True)
            for parameter in parameters:
                kept = self._kept.get(id(parameter))
                # Nothing averages it while it is frozen.
                is_due = not parameter.stop_gradient and id(parameter) not in self._put_back
                if kept is not None and is_due:
                    _add_to_gradient(parameter, kept, is_cleared=id(parameter) not in self._left)
                    self._put_back.add(id(parameter))

    def average(self) -> None:
        """Divide the sums of a round whose last micro-step has run a backward."""
        if self.is_last:
            self._scale(self.parameters)

    def finish(self) -> None:
        """Remember the gradients after a backward that has ended, or raised.

        Raises RuntimeError if the script has written weights since the round's first backward.
        """
        self._is_in_backward = False
        parameters = self.parameters
        if self._arrived:
            if self._is_clipped:
                refuse(CHANGED)
            self._trained |= self._arrived
            self._check_weights(parameters)
        # Those of other models' backwards have been divided again.
        keys = self._arrived.union(self._left)
        self._left = self._states([param for param in parameters if id(param) in keys])

    def _scale(self, parameters: Sequence[Any], *, undo: bool = False) -> None:
        """Divide the sums of the round by the number of steps, or undo that."""
        if not self.averages or self.steps == 1 or self._is_divided is not undo:
            return
        self._is_divided = not undo
        for gradient in filter(None.__ne__, map(gradient_of, parameters)):
            if gradient.is_selected_rows():
                refuse(SPARSE)
            gradient.scale_(float(self.steps) if undo else 1.0 / self.steps)

    def clear(self, key: int) -> None:
        """Forget the gradient of the parameter KEY (an id), which the script clears."""
        if not (self.is_updating or self._is_in_backward):
            is_lost = self._has_told_norm and self._left.keys() == {key}
            self._used.discard(key)
            self._put_back.discard(key)
            self._left.pop(key, None)
            if is_lost:
                # The norm was infinite or too large: the round is lost, as a large batch would be.
                self.start_round()

    def _states(self, parameters: Sequence[Any]) -> dict[int, tuple[int, ...]]:
        """Return, by parameter, what changes when its gradient is written; empty if not dense."""
        dense = {
            id(parameter): gradient
            for parameter, gradient in zip(parameters, map(gradient_of, parameters))
            if gradient is not None and not gradient.is_selected_rows()
        }
        # In some rounds by value, too: Paddle's methods may write without a trace.
        is_exact = updates.is_due("auto", self._number)
        exact = checksums.of_values([*dense.values()]) if is_exact else [0] * len(dense)
        states: dict[int, tuple[int, ...]] = {id(parameter): () for parameter in parameters}
        for (key, gradient), total in zip(dense.items(), exact):
            states[key] = (gradient.inplace_version, gradient.data_ptr(), total)
        return states

    def adopt_clipped(self) -> None:
        """Take the gradients as Paddle's clipping has left them: no backward may add to them."""
        before = self._left
        self._left = self._states([param for param in self.parameters if id(param) in before])
        self._has_told_norm, self._is_clipped = True, self._is_clipped or self._left != before

    def has_left(self, tensor: Any) -> bool:
        """Whether TENSOR, or None, is a gradient that the last backward has left."""
        address = tensor.data_ptr() if self._left and tensor is not None else None
        return any(address in state[1:2] for state in self._left.values())

    def check_left(self) -> None:
        """Raise RuntimeError if the script has changed what the last backward has left."""
        left = [parameter for parameter in self.parameters if id(parameter) in self._left]
        states = self._states(left)
        for parameter in left:
            if self._left[id(parameter)] != states[id(parameter)]:
                if not is_zero(gradient_of(parameter)):
                    refuse(CHANGED)
                self.clear(id(parameter))

    def check_step(self) -> None:
        """Raise RuntimeError if this step cannot be merged."""
        parameters = self.parameters
        self._check_weights(parameters)
        if self._used:
            refuse(NOT_CLEARED)
        if not self.is_last:
            self.check_left()
        elif any(param.stop_gradient for param in parameters if id(param) in self._kept):
            refuse(FROZEN)
        elif self.merged and self._kept.keys() - self._put_back:
            refuse(CLEARED_LAST if self._left else NO_BACKWARD)
        elif self._kept.keys() & self.parallel - self.averaging:
            refuse(NOT_AVERAGED)
        # Those of the last micro-step may be other ranks' alone.
        if not (self.is_last and self._left):
            others = (gradient_of(item) for item in parameters if id(item) not in self._left)
            if not all(map(is_zero, others)):
                refuse(NO_BACKWARD)

    def merge(self) -> None:
        """Add the gradients of a step that updates nothing to the sums."""
        for parameter in self.parameters:
            key, gradient = id(parameter), gradient_of(parameter)
            # A hook may have removed it.
            if key not in self._left or gradient is None:
                continue
            if gradient.is_selected_rows():
                refuse(SPARSE)
            kept = self._kept.get(key)
            self._kept[key] = gradient.clone() if kept is None else kept.add_(gradient)
        self.merged += 1
        self.is_updated = False
        self._end_micro_step()

    def start_round(self) -> None:
        """Reset after an update."""
        self.merged, self._kept, self.is_updated = 0, {}, True
        self._number += 1
        self.forget_weights()
        self._end_micro_step()

    def _end_micro_step(self) -> None:
        self.steps_unscheduled += 1
        self._used |= self._left.keys()
        self._left = {}
        self._put_back.clear()
        self.averaging.clear()
        self._is_divided = self._has_told_norm = self._is_clipped = False


def gradient_of(parameter: Any) -> Any:
    """Return the gradient of PARAMETER, which mixed precision may keep in `main_grad`, or None."""
    gradient = getattr(parameter, "main_grad", None)
    # Not `grad`, which is None while a parameter is frozen.
    return parameter._grad_ivar() if gradient is None else gradient


def is_zero(gradient: Any) -> bool:
    """Whether GRADIENT is None, or has zeros only."""
    return gradient is None or not bool((gradient != 0).any())


def _add_to_gradient(parameter: Any, kept: Any, *, is_cleared: bool) -> None:
    """Add KEPT to the gradient of PARAMETER, to which the next backward adds."""
    import paddle

    gradient = gradient_of(parameter)
    if gradient is None or gradient.dtype != kept.dtype:
        tensors.set_gradient(parameter, kept.clone() if is_cleared else kept + gradient)
    else:
        # In place: it may be in `main_grad`.
        paddle.assign(kept if is_cleared else kept + gradient, gradient)
    tensors.keep_memory(parameter)
