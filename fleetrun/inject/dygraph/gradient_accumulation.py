"""Merges the gradients of several micro-steps into one update.

A round is `k_steps` calls of `optimizer.step()` (or `minimize`, or the same through GradScaler).
All calls but the last update nothing, and the models send nothing. The round's gradients are kept
beside `parameter.grad`, as each backward has left them: what a script does to gradients between
backward and step has no effect there. The first backward of the last micro-step finds the sums of
the others in `parameter.grad`, so its reduction averages the whole round. They are divided by
`k_steps` (with `avg`) when it has ended: what the script does to them then counts once per update.

* Gradients that the script clears before a step do not count.
* A learning rate scheduler that is stepped with the optimizer advances once per update. One that is
  stepped once in several steps (per epoch) advances whenever the script steps it.
* GradScaler unscales, looks for infinities and updates its scale at the last step only.
* A partial round is dropped, and the report says so.
* What cannot equal the larger batch ends the job with one sentence, before an update.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import border, settings, updates
from ..evidence import EFFECTIVE, NO_EFFECT, SCRIPT, Evidence, plural
from ..paddle_api import tensors
from ..spec import StrategySpec

_FIELDS = ("gradient_merge", "gradient_merge_configs")
# The attribute of an optimizer that updates only its share: all parameters that have gradients.
_WHOLE = "_fleetrun_whole"
# The first rounds, in which the values of weights are compared even if nothing has written them.
_FIRST_ROUNDS = 2
# Rounding relative to the largest weight, as normalising twice causes.
_ROUNDING = 1e-6
# So often a script may change its weights between backwards without any step, as by loading them.
_LONE_WRITES = 1
# By address: the writes that leave no other trace.
_writes: Counter[int] = Counter()

BETWEEN_BACKWARDS = "the script changes gradients between two backwards of one step"
COMPOSED = (
    "the script changes gradients after it has cleared those of an earlier backward of the same"
    " step, as if it composed them from several backwards"
)
NO_BACKWARD = "the script computes gradients without backward, as with paddle.grad"
NOT_CLEARED = "the script does not clear the gradients of the step before"
CLEARED_LAST = (
    "the script clears some gradients of the last micro-step of an update, and steps without them"
)
SPARSE = "a gradient is sparse: create embeddings with sparse=False"
TWO_OPTIMIZERS = "two optimizers update the same parameters in turn"
OTHER_WEIGHTS = (
    "the script writes weights between the backwards of one update, or between a backward and its"
    " step, as SAM does (if it clips them after each step: clip them before the first one, too)"
)
OWN_UPDATES = "the script updates the weights itself and never calls step of its optimizer"


def refuse(reason: str) -> None:
    """Raise RuntimeError: the gradients cannot be merged for REASON."""
    raise RuntimeError(
        f"fleetrun: gradient_merge: {reason}: this cannot be merged; use the strategy without"
        " gradient_merge."
    )


class RoundWeights:
    """The weights of one optimizer since the first backward of a round."""

    def __init__(self) -> None:
        self._rounds = 0
        # The script has written weights within a round.
        self._are_written = False
        self._states: list[tuple[int, ...]] = []
        self._copies: list[Any] = []

    def end_round(self) -> None:
        """Forget the weights after an update."""
        self._rounds += 1
        self._states = []

    def forget(self) -> None:
        """Forget the weights, which may have changed before the round's first gradients."""
        self._states = []

    def remember(self, parameters: Sequence[Any]) -> None:
        """Remember PARAMETERS as they are."""
        self._states = written_states(parameters)
        # Copies take memory.
        compares = self._are_written or self._rounds < _FIRST_ROUNDS
        self._copies = [item.detach().clone() for item in parameters] if compares else []

    def are_changed(
        self, parameters: Sequence[Any], trained: set[int], *, or_written: bool = False
    ) -> bool:
        """Whether PARAMETERS among TRAINED (ids) have changed since `remember`.

        A script may write the same values, as where it swaps averages in for a while. OR_WRITTEN:
        or have been written since the last call.
        """
        if len(self._states) != len(parameters):
            self.remember(parameters)
            return False
        before, self._states = self._states, written_states(parameters)
        is_written = any(
            old != new and id(parameter) in trained
            for parameter, old, new in zip(parameters, before, self._states)
        )
        self._are_written |= is_written
        if is_written and or_written:
            return True
        return (is_written or self._rounds < _FIRST_ROUNDS) and any(
            id(parameter) in trained and _differ(copy, parameter)
            for parameter, copy in zip(parameters, self._copies)
        )


class MergeRound:
    """The gradients that one optimizer has merged since its last update."""

    def __init__(self, optimizer: Any, steps: int, *, averages: bool) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.steps = steps
        self.averages = averages
        # Micro-steps since the last update; and the sums of their gradients, by parameter.
        self.merged = 0
        self._kept: dict[int, Any] = {}
        # The same with what the backwards since the last step have computed.
        self._pending: dict[int, Any] = {}
        # The gradients that have arrived since the last step, as the last backward left them.
        self._seen: dict[int, tuple[int, ...]] = {}
        # The ids of parameters whose gradients have arrived in the last backward, and ever.
        self._arrived: set[int] = set()
        self._trained: set[int] = set()
        self._hooked: set[int] = set()
        # In the last micro-step: the ids of parameters whose gradients contain the kept sums, and
        # whether all are divided.
        self._put_back: set[int] = set()
        self._is_divided = False
        # The ids of gradients that a step has used, and that nobody has cleared since.
        self._used: set[int] = set()
        # The script has cleared gradients of this micro-step; and those that it has changed before
        # this backward.
        self._has_cleared = False
        self._changed: set[int] = set()
        self.weights = RoundWeights()
        # How often the weights have changed between backwards without any step.
        self._lone_writes = 0
        # The update is under way; steps within it are parts of it.
        self.is_updating = False
        self._is_in_backward = False
        # For schedulers: the steps since a scheduler's last step, and whether the last one updated.
        self.steps_unscheduled = 0
        self.is_updated = True
        self._watch(self.parameters)

    @property
    def parameters(self) -> list[Any]:
        """The parameters whose gradients are merged, whichever rank updates them."""
        optimizer = self.optimizer()
        if optimizer is None:
            return []
        whole = optimizer.__dict__.get(_WHOLE)
        return updates.parameters_of(optimizer) if whole is None else list(whole)

    @property
    def is_last(self) -> bool:
        """Whether the next step updates the parameters."""
        return self.merged + 1 >= self.steps

    def _watch(self, parameters: Iterable[Any]) -> None:
        """Record the gradients of PARAMETERS that are trained by now."""
        for parameter in parameters:
            if tensors.is_trained(parameter) and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                # A C function costs less than one of ours; and it must not hold this object.
                tensors.on_gradient(parameter, functools.partial(self._arrived.add, id(parameter)))

    # Around a backward.

    def begin(self) -> None:
        """Prepare the gradients for a backward."""
        parameters = self.parameters
        self._watch(parameters)
        self._is_in_backward = True
        self._changed = self._changed_gradients(parameters)
        if self._used:
            zeros = {id(param) for param in parameters if is_zero(gradient_of(param))}
            self._used -= zeros
        self._arrived.clear()
        if self.is_last and self.merged:
            self._scale(parameters, undo=True)
            for parameter in parameters:
                kept = self._kept.get(id(parameter))
                if kept is not None and id(parameter) not in self._put_back:
                    add_to_gradient(parameter, kept, is_cleared=id(parameter) not in self._seen)
                    self._put_back.add(id(parameter))

    def finish(self) -> None:
        """Keep the gradients of a backward that has ended, or raised.

        Raises RuntimeError if the script has done what cannot be merged.
        """
        self._is_in_backward = False
        parameters = self.parameters
        if self.is_last:
            self._scale(parameters)
        if not self._arrived:
            return
        if self.weights.are_changed(parameters, self._trained):
            if self.merged or self._seen:
                refuse(OTHER_WEIGHTS)
            self._lone_writes += 1
            if self._lone_writes > _LONE_WRITES:
                refuse(OWN_UPDATES)
            self.weights.remember(parameters)
        if not self._changed.isdisjoint(self._arrived):
            refuse(BETWEEN_BACKWARDS)
        self._trained |= self._arrived
        for parameter in () if self.is_last else parameters:
            key, gradient = id(parameter), gradient_of(parameter)
            # A hook may have removed it.
            if key in self._arrived and gradient is not None:
                if gradient.is_selected_rows():
                    refuse(SPARSE)
                kept = self._kept.get(key)
                self._pending[key] = gradient.clone() if kept is None else kept + gradient
        self._seen = _states(parameters, self._arrived.union(self._seen))

    def _scale(self, parameters: Sequence[Any], *, undo: bool = False) -> None:
        """Divide the sums of the round by the number of steps, or undo that."""
        if not self.averages or self.steps == 1 or self._is_divided is not undo:
            return
        self._is_divided = not undo
        # Perhaps some are other ranks' alone.
        for gradient in filter(None.__ne__, map(gradient_of, parameters)):
            if gradient.is_selected_rows():
                refuse(SPARSE)
            gradient.scale_(float(self.steps) if undo else 1.0 / self.steps)

    # What the script does to gradients.

    def clear(self, key: int) -> None:
        """Forget the gradient of the parameter KEY (an id), which the script clears."""
        if self.is_updating or self._is_in_backward:
            return
        self._used.discard(key)
        self._put_back.discard(key)
        self._pending.pop(key, None)
        self._has_cleared |= self._seen.pop(key, None) is not None

    def see(self) -> None:
        """Accept the gradients as they are: Paddle has clipped or unscaled them."""
        self._seen = _states(self.parameters, self._seen)

    def _changed_gradients(self, parameters: Sequence[Any]) -> set[int]:
        """Return the ids of the parameters whose gradients the script has changed since."""
        now = _states(parameters, self._seen)
        return {key for key, state in self._seen.items() if now[key] != state}

    # Steps.

    def check_step(self) -> None:
        """Raise RuntimeError if this step cannot be merged."""
        parameters = self.parameters
        if self.weights.are_changed(parameters, self._trained, or_written=True):
            refuse(OTHER_WEIGHTS)
        if self._used:
            refuse(NOT_CLEARED)
        if self._has_cleared and self._changed_gradients(parameters):
            refuse(COMPOSED)
        if self.is_last and self.merged and self._kept.keys() - self._put_back:
            refuse(CLEARED_LAST if self._seen else NO_BACKWARD)
        others = [param for param in parameters if id(param) not in self._seen]
        # Those of the last micro-step may be other ranks' alone.
        if not (self.is_last and self._seen) and not all(map(is_zero, map(gradient_of, others))):
            refuse(NO_BACKWARD)

    def merge(self) -> None:
        """Count a step that updates nothing."""
        self._kept.update(self._pending)
        self.merged += 1
        self.is_updated = False
        self._end_micro_step()

    def start_round(self) -> None:
        """Reset after an update."""
        self.merged = 0
        self._kept = {}
        self.weights.end_round()
        self.is_updated = True
        self._end_micro_step()

    def _end_micro_step(self) -> None:
        self.steps_unscheduled += 1
        self._lone_writes = 0
        self._used |= self._seen.keys()
        self._pending, self._seen = {}, {}
        self._put_back.clear()
        self._is_divided = self._has_cleared = False


class GradientMerge:
    """The rounds of all optimizers of this process."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        # By the id of the optimizer; and of the parameters, the newest last: a script may replace
        # its optimizer.
        self._rounds: dict[int, MergeRound] = {}
        self._owners: dict[int, list[MergeRound]] = {}
        self._owned: list[tuple[int, int]] = []
        # All steps of all optimizers, merged or updating.
        self._steps = 0
        # Returns the number of allreduces so far.
        self.count_calls: Callable[[], int] = lambda: 0
        self._calls_before = 0
        # Other parts of this job that merge, for the report.
        self.hint = ""
        # Nothing is merged.
        self._is_withdrawn = False

    def of(self, optimizer: Any) -> MergeRound | None:
        """Return the round of OPTIMIZER, Paddle's or fleet's; None if it does not merge."""
        import paddle

        optimizer = unwrap(optimizer)
        if self._is_withdrawn or not paddle.in_dynamic_mode():
            return None
        if not getattr(optimizer, "_parameter_list", None):
            return None
        if updates.is_model_average(type(optimizer)):
            return None
        current = self._rounds.get(id(optimizer))
        if current is None:
            spec = settings.effective_spec()
            current = MergeRound(optimizer, spec.merge_steps, averages=spec.merge_averages)
            self._rounds[id(optimizer)] = current
            weakref.finalize(optimizer, self._rounds.pop, id(optimizer), None).atexit = False
        return current

    def keep_whole(self, optimizer: Any) -> None:
        """Merge the gradients of all parameters of OPTIMIZER, which is about to get its share."""
        optimizer = unwrap(optimizer)
        optimizer.__dict__[_WHOLE] = updates.parameters_of(optimizer)

    def give_up(self, reason: str) -> None:
        """Merge nothing and report REASON; called before the first step."""
        self._is_withdrawn = True
        self._rounds.clear()
        self._report_fields(NO_EFFECT, reason=reason)

    def all(self) -> list[MergeRound]:
        """Return the rounds of all optimizers that live."""
        return list(self._rounds.values())

    def _refresh(self) -> None:
        """Adopt what the script sets after its optimizer: settings, and parameters."""
        if not self._steps:
            spec = settings.effective_spec()
            for current in self.all():
                current.steps, current.averages = spec.merge_steps, spec.merge_averages
        owned = [(id(current), len(current.parameters)) for current in self.all()]
        if owned != self._owned:
            self._owned = owned
            self._owners = {}
            for current in self.all():
                for parameter in current.parameters:
                    self._owners.setdefault(id(parameter), []).append(current)

    def owners(self, parameters: Iterable[Any]) -> list[MergeRound]:
        """Return the newest rounds of PARAMETERS, each once."""
        newest = [self.owners_of(parameter)[-1:] for parameter in parameters]
        return list({id(owner): owner for owners in newest for owner in owners}.values())

    def owners_of(self, parameter: Any) -> Sequence[MergeRound]:
        """Return all rounds of PARAMETER."""
        return self._owners.get(id(parameter), ())

    def must_sync(self, parameters: Sequence[Any]) -> bool:
        """Whether this backward must average the gradients of PARAMETERS over the ranks.

        Not if a later step of the round will use all of them. A parameter without a known optimizer
        may be used at any time. Averaging once too often does no harm.
        """
        self._refresh()
        owners = map(self.owners_of, parameters)
        return any(not several or any(owner.is_last for owner in several) for several in owners)

    def step(self, current: MergeRound, update: Callable[[], Any]) -> Any:
        """Merge the gradients of CURRENT, or call UPDATE if its round is complete."""
        import paddle

        if current.is_updating:
            return update()
        self._refresh()
        self._steps += 1
        if len(self._rounds) > 1:
            owners = {other for item in current.parameters for other in self.owners_of(item)}
            if any(other.merged for other in owners - {current}):
                refuse(TWO_OPTIMIZERS)
        with paddle.no_grad():
            current.check_step()
        if not current.is_last:
            current.merge()
            self._calls_before = self.count_calls()
            return None
        self._report(current)
        current.is_updating = True
        try:
            result = update()
        finally:
            current.is_updating = False
        current.start_round()
        for other in self.all():
            if not other.merged:
                other.weights.forget()
        return result

    def average(self, parameters: Sequence[Any], step: Callable[[], Any]) -> Any:
        """Call STEP, which averages PARAMETERS, if they have been updated."""
        return step() if all(owner.is_updated for owner in self.owners(parameters)) else None

    # As a listener of backward.

    def begin(self) -> None:
        """Prepare the gradients for a backward."""
        self._refresh()
        self._call(MergeRound.begin)

    def finish(self) -> None:
        """Keep the gradients of a backward."""
        self._call(MergeRound.finish)

    # A backward that has raised is over, too.
    abandon = finish

    def _call(self, method: Callable[[MergeRound], None]) -> None:
        import paddle

        with paddle.no_grad():
            for current in self.all():
                if not current.is_updating:
                    method(current)

    # The report.

    def _report_fields(self, status: str, **more: Any) -> None:
        """Report the fields that nothing else has reported."""
        for name in _FIELDS:
            if self._spec.get(name) is not None and self._proof.status(name) is None:
                self._proof.field(name, status, **more)

    @border.watching("the count of merged micro-steps")
    def _report(self, current: MergeRound) -> None:
        allreduces = self.count_calls() - self._calls_before
        steps = current.merged + 1
        self._proof.graph = "dygraph"
        if settings.script_does("gradient_merge"):
            return
        self._proof.counts["merged_steps"] = steps
        text = f"{steps} micro-steps made one update; {plural(allreduces, 'allreduce')} by fleetrun"
        text += f" in the last one{self.hint}"
        for name in _FIELDS:
            if self._spec.get(name) is None:
                continue
            value = settings.effective(name)
            if settings.script_wins(name):
                reason = "the script sets it itself"
                self._proof.field(name, SCRIPT, in_effect=value, reason=reason, evidence=text)
            elif steps > 1:
                self._proof.field(name, EFFECTIVE, in_effect=value, evidence=text)
            else:
                reason = "one micro-step makes an update"
                self._proof.field(name, NO_EFFECT, reason=reason, evidence=text)

    @border.watching("the count of merged micro-steps")
    def report_end(self) -> None:
        """Note the micro-steps that were dropped in partial rounds."""
        if not (self._steps or self._is_withdrawn or self._proof.updates):
            self._report_fields(NO_EFFECT, reason="no optimizer of Paddle's has stepped")
        count = max((current.merged for current in self.all()), default=0)
        if count:
            were = "was" if count == 1 else "were"
            self._proof.note(f"{plural(count, 'micro-step')} of a partial round {were} dropped")
        self._proof.write()


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of fleet and LookAhead."""
    while True:
        parts = getattr(optimizer, "__dict__", {})
        inner = parts.get("_inner_opt", parts.get("inner_optimizer"))
        if inner is None:
            return optimizer
        optimizer = inner


def gradient_of(parameter: Any) -> Any:
    """Return the gradient of PARAMETER, which mixed precision may keep in `main_grad`, or None."""
    gradient = getattr(parameter, "main_grad", None)
    # Not `grad`, which is None while a parameter is frozen.
    return parameter._grad_ivar() if gradient is None else gradient


def is_zero(gradient: Any) -> bool:
    """Whether GRADIENT is None, or has zeros only."""
    return gradient is None or not bool((gradient != 0).any())


def add_to_gradient(parameter: Any, kept: Any, *, is_cleared: bool) -> None:
    """Add KEPT to the gradient of PARAMETER, to which the next backward adds."""
    import paddle

    gradient = gradient_of(parameter)
    if gradient is None or gradient.dtype != kept.dtype:
        tensors.set_gradient(parameter, kept.clone() if is_cleared else kept + gradient)
    else:
        # In place: it may be part of a buffer.
        paddle.assign(kept if is_cleared else kept + gradient, gradient)
    tensors.keep_memory(parameter)


def count_write(tensor: Any) -> None:
    """Count that TENSOR was written by a method that leaves no other trace."""
    if tensor is not None and tensor._is_initialized():
        _writes[tensor.data_ptr()] += 1


def written_states(written: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return a state of each tensor that changes when it is written."""
    return [(*state, _writes.get(state[1], 0)) for state in tensors.states(written)]


def _states(parameters: Iterable[Any], keys: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return the states of the gradients of those PARAMETERS whose ids are KEYS, by these."""
    by_id = {id(parameter): parameter for parameter in parameters}
    gradients = {key: gradient_of(by_id[key]) for key in keys if key in by_id}
    dense = {
        key: gradient
        for key, gradient in gradients.items()
        if gradient is not None and not gradient.is_selected_rows()
    }
    states = dict(zip(dense, written_states([*dense.values()])))
    return {key: states.get(key, ()) for key in keys}


def _differ(before: Any, now: Any) -> bool:
    """Whether NOW differs from BEFORE by more than rounding."""
    if before.shape != now.shape or before.dtype != now.dtype:
        return True
    old, new = before.astype("float32"), now.detach().astype("float32")
    return not bool((old - new).abs().max() <= _ROUNDING * old.abs().max())
