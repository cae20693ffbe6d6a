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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import border, parameter_history, settings, updates
from ..evidence import EFFECTIVE, NO_EFFECT, SCRIPT, Evidence, plural
from ..paddle_api import tensors
from ..spec import StrategySpec

_FIELDS = ("gradient_merge", "gradient_merge_configs")
# The attribute of an optimizer that updates only its share: all parameters that have gradients.
_WHOLE = "_fleetrun_whole"
# The class of an optimizer that contains another one.
_STAGE_2 = "GroupShardedOptimizerStage2"
# The first rounds, in which values are compared, not only in-place versions.
_FIRST_ROUNDS = 2
# Rounding relative to the largest weight, as normalising twice causes.
_ROUNDING = 1e-6
# So often a script may change its weights between backwards without any step, as by loading them.
_LONE_WRITES = 1

BETWEEN_BACKWARDS = "the script changes gradients between two backwards of one step"
COMPOSED = (
    "the script changes gradients after it has read and cleared those of an earlier backward of the"
    " same step, as if it composed them from several backwards"
)
NO_BACKWARD = "the script computes gradients without backward, as with paddle.grad"
NOT_CLEARED = "the script does not clear the gradients of the step before"
CLEARED_LAST = (
    "the script clears some gradients of the last micro-step of an update, and steps without them"
)
SPARSE = "a gradient is sparse: create embeddings with sparse=False"
TWO_OPTIMIZERS = "two optimizers update the same parameters in turn"
CLIPPED_WEIGHTS = (
    "the script changes weights after a step that only merges, perhaps by clipping them: clip the"
    " weights once before the first step, too"
)
OTHER_WEIGHTS = (
    "the script writes weights between the backwards of one update, or between a backward and its"
    " step, as SAM does"
)
OWN_UPDATES = "the script updates the weights itself and never calls step of the optimizer ({})"


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
        self._states: list[tuple[int, int]] | None = None
        self._copies: list[Any] = []
        # The ids of tensors written by methods that leave no other trace.
        self._recorded: set[int] = set()
        parameter_history.record_writes(self._recorded)
        weakref.finalize(self, parameter_history.end_record, self._recorded).atexit = False

    @property
    def is_first_round(self) -> bool:
        """Whether no round has ended yet."""
        return not self._rounds

    def end_round(self) -> None:
        """Forget the weights after an update."""
        self._rounds += 1
        self._states = None

    def forget(self) -> None:
        """Forget the weights, which something else has updated."""
        self._states = None

    def remember(self, parameters: Sequence[Any]) -> None:
        """Remember PARAMETERS as they are."""
        self._states = tensors.states(parameters)
        self._recorded.clear()
        self._copies = []
        if self._are_written or self._rounds < _FIRST_ROUNDS:
            self._copies = [parameter.detach().clone() for parameter in parameters]

    def are_changed(
        self, parameters: Sequence[Any], trained: set[int], *, or_written: bool = False
    ) -> bool:
        """Whether PARAMETERS among TRAINED (ids) have changed since `remember`.

        A script may write the same values, as where it swaps averages in for a while. They are
        compared in the first rounds, and once a script has written any; values that the forward
        writes, such as running statistics, have no gradient. OR_WRITTEN: or have been written since
        the last look.
        """
        if self._states is None or len(self._states) != len(parameters):
            self.remember(parameters)
            return False
        before, self._states = self._states, tensors.states(parameters)
        written = [
            id(parameter) in trained and (old != new or id(parameter) in self._recorded)
            for parameter, old, new in zip(parameters, before, self._states)
        ]
        self._recorded.clear()
        if any(written):
            self._are_written = True
            if or_written:
                return True
        elif self._rounds >= _FIRST_ROUNDS:
            return False
        return any(
            id(parameter) in trained and _differ(copy, parameter)
            for parameter, copy in zip(parameters, self._copies)
        )


class MergeRound:
    """The gradients that one optimizer has merged since its last update."""

    def __init__(self, optimizer: Any, steps: int, *, averages: bool) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.kind = type(optimizer).__name__
        self.steps = steps
        self.averages = averages
        # Micro-steps since the last update; and the sums of their gradients, by parameter.
        self.merged = 0
        self._kept: dict[int, Any] = {}
        # The same with what the backwards since the last step have computed.
        self._pending: dict[int, Any] = {}
        # The ids of parameters whose gradients have arrived: in the last backward, since the last
        # step, and ever.
        self._arrived: set[int] = set()
        self._dirty: set[int] = set()
        self._trained: set[int] = set()
        self._hooked: set[int] = set()
        # In the last micro-step: the ids of parameters whose gradients contain the kept sums, and
        # whether all are divided.
        self._put_back: set[int] = set()
        self._is_divided = False
        # The ids of gradients that a step has used, and that nobody has cleared since.
        self._used: set[int] = set()
        # What the script does with gradients by `parameter.grad` until it steps: ids.
        self._read: set[int] = set()
        self._written: set[int] = set()
        # It has cleared gradients that it has read.
        self._is_composing = False
        # The gradients after the last backward; and those that have changed before this one.
        self._seen: dict[int, tuple[int, int]] = {}
        self._changed: set[int] = set()
        self._weights = RoundWeights()
        self._lone_writes = 0
        # The update is under way; steps within it are parts of it.
        self.is_updating = False
        self._is_in_backward = False
        # For schedulers: the steps since a scheduler's last step, and whether the last one updated.
        self.steps_unscheduled = 0
        self.is_updated = True
        # The number of micro-steps that were cleared.
        self.cleared_steps = 0
        self._rounds = 0
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
        """Prepare the gradients for a backward.

        Raises RuntimeError if the script has done what cannot be merged.
        """
        parameters = self.parameters
        self._watch(parameters)
        self._is_in_backward = True
        self._changed = self._changed_gradients(parameters)
        self._look_at_used(parameters)
        self._arrived.clear()
        if self.is_last and self.merged:
            self._scale(parameters, undo=True)
            self._put_sums_back(parameters)

    def finish(self) -> None:
        """Keep the gradients of a backward that has ended, or raised."""
        self._is_in_backward = False
        parameters = self.parameters
        if self.is_last:
            self._scale(parameters)
        if not self._arrived:
            return
        self._check_weights(parameters)
        if not self._changed.isdisjoint(self._arrived):
            refuse(BETWEEN_BACKWARDS)
        self._trained |= self._arrived
        self._dirty |= self._arrived
        if not self.is_last:
            for parameter in parameters:
                if id(parameter) in self._arrived:
                    self._keep(parameter)
        self._see(parameters)

    def _keep(self, parameter: Any) -> None:
        key, gradient = id(parameter), gradient_of(parameter)
        if gradient is None:
            # A hook has removed it.
            return
        if gradient.is_selected_rows():
            refuse(SPARSE)
        kept = self._kept.get(key)
        self._pending[key] = gradient.clone() if kept is None else kept + gradient

    def _put_sums_back(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            key = id(parameter)
            kept = self._kept.get(key)
            if kept is None or key in self._put_back:
                continue
            add_to_gradient(parameter, kept, is_cleared=key not in self._dirty)
            self._put_back.add(key)

    def _scale(self, parameters: Sequence[Any], *, undo: bool = False) -> None:
        """Divide the sums of the round by the number of steps, or undo that."""
        if not self.averages or self.steps == 1 or self._is_divided is not undo:
            return
        self._is_divided = not undo
        for parameter in parameters:
            gradient = gradient_of(parameter)
            # Perhaps other ranks' alone.
            if gradient is not None:
                if gradient.is_selected_rows():
                    refuse(SPARSE)
                gradient.scale_(float(self.steps) if undo else 1.0 / self.steps)

    def _look_at_used(self, parameters: Sequence[Any]) -> None:
        """Forget the gradients that a step has used, and that the script has set to zero since."""
        for parameter in parameters if self._used else ():
            if id(parameter) in self._used and is_zero(gradient_of(parameter)):
                self._used.discard(id(parameter))

    # What the script does to gradients.

    def clear(self, key: int) -> None:
        """Forget the gradient of the parameter KEY (an id), which the script clears."""
        if self.is_updating or self._is_in_backward:
            return
        self._used.discard(key)
        self._written.discard(key)
        self._put_back.discard(key)
        self._pending.pop(key, None)
        if key in self._dirty:
            self._is_composing = self._is_composing or key in self._read
            self._dirty.discard(key)
            self._seen.pop(key, None)
            self.cleared_steps += not self._dirty

    def read(self, key: int) -> None:
        """Record that the script reads the gradient of the parameter KEY."""
        if not (self.is_updating or self._is_in_backward):
            self._read.add(key)

    def write(self, key: int) -> None:
        """Record that the script sets the gradient of the parameter KEY."""
        if not (self.is_updating or self._is_in_backward):
            self._written.add(key)

    def see(self) -> None:
        """Accept the gradients as they are: Paddle has clipped or unscaled them."""
        self._see(self.parameters)

    def _see(self, parameters: Sequence[Any]) -> None:
        self._seen = {key: state for key, state in _states(parameters) if key in self._dirty}

    def _changed_gradients(self, parameters: Sequence[Any]) -> set[int]:
        """Return the ids of the parameters whose gradients the script has changed since."""
        if not self._dirty:
            return set()
        now = dict(_states(parameters))
        changed = {key for key, state in self._seen.items() if now.get(key) != state}
        if self._rounds < _FIRST_ROUNDS:
            # Some methods write without a new version.
            for parameter in parameters:
                pending, kept = self._pending.get(id(parameter)), self._kept.get(id(parameter))
                gradient = gradient_of(parameter)
                if pending is not None and gradient is not None:
                    now_pending = gradient if kept is None else kept + gradient
                    if not _are_equal(pending, now_pending):
                        changed.add(id(parameter))
        return changed

    # Steps.

    def check_step(self) -> None:
        """Raise RuntimeError if this step cannot be merged."""
        parameters = self.parameters
        if self._weights.are_changed(parameters, self._trained, or_written=True):
            refuse(OTHER_WEIGHTS)
        if self._written - self._dirty:
            refuse(NO_BACKWARD)
        if self._used:
            refuse(NOT_CLEARED)
        if self._is_composing and self._changed_gradients(parameters):
            refuse(COMPOSED)
        if self.is_last and self.merged and self._kept.keys() - self._put_back:
            refuse(CLEARED_LAST if self._dirty else NO_BACKWARD)
        if not (self._dirty or all(map(is_zero, map(gradient_of, parameters)))):
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
        self._rounds += 1
        self._weights.end_round()
        self.is_updated = True
        self._end_micro_step()

    def _end_micro_step(self) -> None:
        self.steps_unscheduled += 1
        self._lone_writes = 0
        self._used |= self._dirty
        self._pending, self._seen = {}, {}
        for ids in (self._dirty, self._put_back, self._read, self._written):
            ids.clear()
        self._is_divided = self._is_composing = False

    # Weights.

    def forget_weights(self) -> None:
        """Accept the weights as they are, since an optimizer has updated them."""
        self._weights.forget()

    def _check_weights(self, parameters: Sequence[Any]) -> None:
        """Raise RuntimeError if the weights have changed since the round's first gradients."""
        if not self._weights.are_changed(parameters, self._trained):
            return
        if self.merged or self._dirty:
            # Clipping after each step changes nothing once an update was clipped.
            is_clipped = self._weights.is_first_round and not self._dirty
            refuse(CLIPPED_WEIGHTS if is_clipped else OTHER_WEIGHTS)
        self._lone_writes += 1
        if self._lone_writes > _LONE_WRITES:
            refuse(OWN_UPDATES.format(self.kind))
        self._weights.remember(parameters)


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
        # The most micro-steps of a partial round that were lost with an optimizer.
        self._dropped = 0
        # All steps of all optimizers, merged or updating.
        self.steps = 0
        # Returns the number of allreduces so far.
        self.count_calls: Callable[[], int] = lambda: 0
        self._calls_before = 0
        # The allreduces that the script or Paddle's Python has made: so far, and before this round.
        self.other_calls = self._others_before = 0
        # Other parts of this job that merge, for the report.
        self.hint = ""
        # Whether steps are patched, and whether the device of some rank cannot merge.
        self.is_installed = False
        self._is_withdrawn = False

    def of(self, optimizer: Any) -> MergeRound | None:
        """Return the round of OPTIMIZER, Paddle's or fleet's; None if it does not merge."""
        import paddle

        optimizer = unwrap(optimizer)
        if self._is_withdrawn or not paddle.in_dynamic_mode():
            return None
        if not getattr(optimizer, "_parameter_list", None) or type(optimizer).__name__ == _STAGE_2:
            return None
        if updates.is_model_average(type(optimizer)):
            return None
        current = self._rounds.get(id(optimizer))
        if current is None or current.optimizer() is not optimizer:
            spec = settings.effective_spec()
            current = MergeRound(optimizer, spec.merge_steps, averages=spec.merge_averages)
            self._rounds[id(optimizer)] = current
            gone = weakref.finalize(optimizer, self._end, id(optimizer), current)
            gone.atexit = False
        return current

    def _end(self, key: int, current: MergeRound) -> None:
        self._dropped = max(self._dropped, current.merged)
        if self._rounds.get(key) is current:
            del self._rounds[key]

    def keep_whole(self, optimizer: Any) -> None:
        """Merge the gradients of all parameters of OPTIMIZER, which is about to get its share."""
        optimizer = unwrap(optimizer)
        optimizer.__dict__[_WHOLE] = updates.parameters_of(optimizer)

    def withdraw(self) -> None:
        """Merge nothing; called before the first step."""
        self.is_installed, self._is_withdrawn = False, True
        self._rounds.clear()

    def give_up(self, reason: str) -> None:
        """Merge nothing and report REASON; called before the first step."""
        self.withdraw()
        self._report_fields(NO_EFFECT, reason=reason)

    def _report_fields(self, status: str, **more: Any) -> None:
        """Report the fields that nothing else has reported."""
        for name in _FIELDS:
            if self._spec.get(name) is not None and self._proof.status(name) is None:
                self._proof.field(name, status, **more)

    def all(self) -> list[MergeRound]:
        """Return the rounds of all optimizers that live."""
        return list(self._rounds.values())

    def _refresh(self) -> None:
        """Adopt what the script sets after its optimizer: settings, and parameters."""
        if not self.steps:
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
        newest = [self._owners.get(id(parameter), [])[-1:] for parameter in parameters]
        return list({id(owner): owner for owners in newest for owner in owners}.values())

    def owners_of(self, parameter: Any) -> Sequence[MergeRound]:
        """Return all rounds of PARAMETER."""
        return self._owners.get(id(parameter), ())

    def must_sync(self, parameters: Sequence[Any]) -> bool:
        """Whether this backward must average the gradients of PARAMETERS over the ranks.

        Not if a later step of the round will use all of them. A parameter without a known optimizer
        may be used at any time. Averaging once too often does no harm.
        """
        if not self._rounds:
            return True
        self._refresh()
        owners = [self.owners_of(parameter) for parameter in parameters]
        return any(not several or any(owner.is_last for owner in several) for several in owners)

    def step(self, current: MergeRound, update: Callable[[], Any]) -> Any:
        """Merge the gradients of CURRENT, or call UPDATE if its round is complete."""
        import paddle

        if current.is_updating:
            return update()
        self._refresh()
        self.steps += 1
        shared = self._sharing(current)
        if any(other.merged for other in shared):
            refuse(TWO_OPTIMIZERS)
        with paddle.no_grad():
            current.check_step()
        if not current.is_last:
            current.merge()
            return None
        self._report(current)
        current.is_updating = True
        try:
            result = update()
        finally:
            current.is_updating = False
        current.start_round()
        for other in shared:
            other.forget_weights()
        return result

    def _sharing(self, current: MergeRound) -> list[MergeRound]:
        """Return the other rounds with parameters of CURRENT."""
        if len(self._rounds) == 1:
            return []
        sharing = {
            id(other): other
            for parameter in current.parameters
            for other in self.owners_of(parameter)
            if other is not current
        }
        return list(sharing.values())

    def step_scaled(self, current: MergeRound, update: Callable[[], Any]) -> Any:
        """Call UPDATE, a step of GradScaler, which steps only if all gradients are finite."""
        result = update()
        if current.merged:
            # GradScaler has found an infinity: the round is lost, as a large batch would be.
            current.start_round()
        return result

    def average(self, parameters: Sequence[Any], step: Callable[[], Any]) -> Any:
        """Call STEP, which averages PARAMETERS, if they have been updated."""
        return step() if all(owner.is_updated for owner in self.owners(parameters)) else None

    # As a listener of backward.

    def begin(self) -> None:
        """Prepare the gradients for a backward."""
        import paddle

        self._refresh()
        with paddle.no_grad():
            for current in self.all():
                if not current.is_updating:
                    current.begin()

    def finish(self) -> None:
        """Keep the gradients of a backward."""
        import paddle

        with paddle.no_grad():
            for current in self.all():
                if not current.is_updating:
                    current.finish()

    # A backward that has raised is over, too.
    abandon = finish

    @border.watching("the count of merged micro-steps")
    def _report(self, current: MergeRound) -> None:
        calls = self.count_calls()
        allreduces, self._calls_before = calls - self._calls_before, calls
        others = self.other_calls - self._others_before
        self._others_before = self.other_calls
        steps = current.merged + 1
        self._proof.graph = "dygraph"
        if settings.script_does("gradient_merge"):
            return
        self._proof.counts["merged_steps"] = steps
        text = f"{steps} micro-steps made one update; {plural(allreduces, 'allreduce')} among them"
        if others:
            text = (
                f"{steps} micro-steps made one update; {plural(others, 'allreduce')} by the script"
                f" or Paddle among them, {allreduces or 'none'} by fleetrun"
            )
        text += self.hint
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
        """Note the micro-steps that were dropped in partial rounds, or cleared."""
        if not (self.steps or self._is_withdrawn or self._proof.updates):
            self._report_fields(NO_EFFECT, reason="no optimizer of Paddle's has stepped")
        cleared = sum(current.cleared_steps for current in self.all())
        if cleared:
            text = "were cleared before a step, and did not count (gradient_merge)"
            self._proof.note(f"{plural(cleared, 'micro-step')} {text}")
        count = max(self._dropped, *(current.merged for current in self.all()), 0)
        if count:
            were = "was" if count == 1 else "were"
            self._proof.note(f"{plural(count, 'micro-step')} of a partial round {were} dropped")
        if cleared or count or not self.steps:
            self._proof.write()


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of fleet and LookAhead."""
    while True:
        parts = getattr(optimizer, "__dict__", {})
        inner = parts.get("_inner_opt", parts.get("inner_optimizer"))
        if type(optimizer).__name__ == _STAGE_2:
            # Not there before the end of its `__init__`.
            inner = parts.get("_optim")
        if inner is None:
            return optimizer
        optimizer = inner


def gradient_of(parameter: Any) -> Any:
    """Return the gradient of PARAMETER, which mixed precision may keep in `main_grad`, or None."""
    gradient = getattr(parameter, "main_grad", None)
    # Not `grad`, which the script reads, and which is None while a parameter is frozen.
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


def _states(parameters: Iterable[Any]) -> list[tuple[int, tuple[int, int]]]:
    """Return, by the id of each parameter, the address and in-place version of its gradient."""
    states = []
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is not None and not gradient.is_selected_rows():
            states.append((id(parameter), (gradient.data_ptr(), gradient.inplace_version)))
    return states


def _are_equal(before: Any, now: Any) -> bool:
    """Whether two tensors are equal, not numbers included."""
    if before.shape != now.shape or before.dtype != now.dtype:
        return False
    return bool(((before == now) | (before.isnan() & now.isnan())).all())


def _differ(before: Any, now: Any) -> bool:
    """Whether NOW differs from BEFORE by more than rounding."""
    if before.shape != now.shape or before.dtype != now.dtype:
        return True
    old, new = before.astype("float32"), now.detach().astype("float32")
    return not bool((old - new).abs().max() <= _ROUNDING * old.abs().max())
