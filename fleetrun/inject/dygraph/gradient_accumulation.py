"""Merges the gradients of several micro-steps into one update.

A round is `k_steps` calls of `optimizer.step()` (or `minimize`, or the same through GradScaler).
All calls but the last do nothing: gradients accumulate in `parameter.grad`, `clear_grad` does not
discard them, and the models skip their allreduces. The last call averages the gradients over the
ranks, divides them by `k_steps` (with `avg`), clips, regularises and applies them.

* What the script does to gradients between backward and step takes effect in the last micro-step
  only, on the averaged gradients and in the script's order. In the others it sees copies.
* A micro-step whose gradients the script clears before its step does not count.
* A learning rate scheduler that is stepped with the optimizer advances once per update. One that is
  stepped once in several steps (per epoch) advances whenever the script steps it.
* GradScaler unscales, looks for infinities and updates its scale at the last step only.
* A partial round is dropped, and the report says so.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from .. import border, settings, updates
from ..evidence import EFFECTIVE, NO_EFFECT, SCRIPT, plural
from ..paddle_api import tensors
from .kept_gradients import KeptGradients, ScriptGradients, copies, identities, is_rescaled
from .round_weights import RoundWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..evidence import Evidence
    from ..spec import StrategySpec


_FIELDS = ("gradient_merge", "gradient_merge_configs")
# The attribute of an optimizer with its accumulator.
_HELD_BY_OPTIMIZER = "_fleetrun_accumulator"
# The attribute of an optimizer that updates only its share: all parameters that have gradients.
_WHOLE = "_fleetrun_whole"
# The class of an optimizer that contains another one.
_STAGE_2 = "GroupShardedOptimizerStage2"
# The number of micro-steps in which the script's changes of gradients are looked for.
_WATCHED_STEPS = 8
_WATCHED = "the watch over merged gradients"
_COMPOSED = (
    "fleetrun: gradient_merge: the script changes gradients after it has read and cleared those of"
    " an earlier backward of the same step: gradients that are composed from several backwards"
    " cannot be merged."
)
_CHANGED_AFTER_STEP = (
    "fleetrun: gradient_merge: merged gradients have changed after a step, through references that"
    " the script holds, or in a paddle.jit.to_static function that does not accumulate gradients:"
    " use the strategy without gradient_merge."
)
_TWO_OPTIMIZERS = (
    "fleetrun: gradient_merge: two optimizers update the same parameters in turn, so their"
    " gradients would be merged together: use the strategy without gradient_merge."
)
_CLIPPED_WEIGHTS = (
    "fleetrun: gradient_merge: the script changes weights after a step that only merges, perhaps by"
    " clipping them, and gradients at different weights cannot be merged: clip the weights once"
    " before the first step, too, or use the strategy without gradient_merge."
)
_SPARSE = (
    "fleetrun: gradient_merge: Paddle crashes when it adds up sparse gradients on a plug-in device:"
    " create embeddings with sparse=False, or use the strategy without gradient_merge."
)
_OTHER_WEIGHTS = (
    "fleetrun: gradient_merge: the script writes weights between the backwards of one update, or"
    " between a backward and its step, as SAM does: gradients at different weights cannot be"
    " merged: use the strategy without gradient_merge."
)


def _ignore(_steps: int) -> None:
    """Do nothing."""


class GradientAccumulator:
    """The gradients that one optimizer has merged since its last update."""

    def __init__(self, optimizer: Any, steps: int, *, averages: bool) -> None:
        self.optimizer = optimizer
        self.set_steps(steps, averages=averages)
        self.parameters = _parameters_of(optimizer)
        # Micro-steps that were merged since the last update.
        self.merged = 0
        # The update is under way; steps within it are parts of it.
        self.is_updating = False
        # The ids of parameters whose gradients have grown since the last step.
        self._dirty: set[int] = set()
        # The ids of those that have ever had a gradient in a step.
        self._trained: set[int] = set()
        self._weights = RoundWeights()
        self._is_divided = False
        # The merged gradients before this micro-step, and what the script sees of them in it.
        self._kept: KeptGradients | None = None
        self._script: ScriptGradients | None = None
        # The gradients after the last backward or step; see `identities`.
        self._seen: list[tuple[int, int] | None] = []
        # The script's changes since the last backward or step.
        self._is_read = self._is_written = self._is_in_backward = False
        # Since the last step the script has cleared gradients that it had read, and has then scaled
        # or clamped others. A script that composes gradients does so in each step.
        self._is_composing = self._has_rescaled = False
        # There was a step in which the script did not.
        self._has_plain_step = False
        # The averaged gradients that a composing script may change.
        self._averaged: list[Any] = []
        # The number of micro-steps that were cleared.
        self.cleared = 0
        # For schedulers: the steps since a scheduler's last step, and whether the last one updated.
        self.steps_unscheduled = 0
        self.is_updated = True
        # Called with the number of micro-steps of a partial round that is lost with the optimizer.
        self.on_gone: Callable[[int], None] = _ignore
        # The gradients that Paddle reduces and keeps in each backward, which are not watched.
        self.reduced_gradients: Callable[[], Sequence[Any]] = tuple
        self._hooked: set[int] = set()
        self._watch_backwards()

    def __del__(self) -> None:
        # `__init__` may have raised.
        getattr(self, "on_gone", _ignore)(getattr(self, "merged", 0))

    def set_steps(self, steps: int, *, averages: bool) -> None:
        """Merge STEPS micro-steps into an update, and divide by them if it AVERAGES."""
        self._steps = steps
        self._averages = averages

    def takes_new_parameters(self) -> bool:
        """Update the parameters from the optimizer; return whether their number has changed."""
        before, self.parameters = self.parameters, _parameters_of(self.optimizer)
        return len(before) != len(self.parameters)

    def _watch_backwards(self) -> None:
        """Record the gradients of all parameters that are trained by now."""
        for parameter in self.parameters:
            if tensors.is_trained(parameter) and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                # A C function costs less than one of ours; and it must not hold this object.
                tensors.on_gradient(parameter, functools.partial(self._dirty.add, id(parameter)))

    @property
    def is_dirty(self) -> bool:
        """Whether a backward has added gradients that no step has seen."""
        return bool(self._dirty)

    @property
    def is_last(self) -> bool:
        """Whether the next step updates the parameters."""
        return self.merged + 1 >= self._steps

    def merge(self) -> None:
        """Count a step that updates nothing."""
        self.merged += 1
        self.steps_unscheduled += 1
        self.is_updated = False
        self._end_micro_step()

    def _end_micro_step(self) -> None:
        self._trained |= self._dirty
        self._dirty.clear()
        self._kept = None
        self._averaged = []
        self._is_read = self._is_written = self._is_composing = False

    def check_step(self) -> None:
        """Raise RuntimeError if the script's changes before this step cannot be merged."""
        if self._weights.are_written(self._trained | self._dirty):
            raise RuntimeError(_OTHER_WEIGHTS)
        if not (self.merged or self.is_last) and tensors.crash_if_added_to(self.parameters):
            raise RuntimeError(_SPARSE)
        self._has_plain_step |= not self._is_composing
        if self._is_composing and self._script is None and self.is_changed():
            self._check_rescaled(self._averaged, tensors.gradients(self.parameters))
        elif self._is_composing and self._script is not None and self._script.is_changed():
            merged = tensors.gradients(self.parameters)
            self._check_rescaled(merged, self._script.replace(self.parameters, merged))
        if self._has_rescaled and self.is_last and not self._has_plain_step:
            raise RuntimeError(_COMPOSED)
        if self._is_written and not (self._dirty or self.merged):
            raise RuntimeError(
                "fleetrun: gradient_merge: the script computes gradients without backward, as with"
                " paddle.grad: they cannot be merged."
            )

    def _check_rescaled(self, before: Sequence[Any], now: Sequence[Any]) -> None:
        """Raise RuntimeError unless the gradients NOW are those BEFORE, scaled or clamped."""
        if len(before) != len(now) or not all(map(is_rescaled, before, now)):
            raise RuntimeError(_COMPOSED)
        self._has_rescaled = True

    def begin_backward(self) -> None:
        """Restore the gradients to the sums of this rank's micro-steps; keep a copy of them.

        Raises RuntimeError if the script has changed averaged gradients to which more are added.
        """
        self._script = None
        self._is_in_backward = True
        self._watch_backwards()
        self._check_weights()
        if self._is_divided:
            if self.is_changed():
                raise RuntimeError(
                    "fleetrun: gradient_merge: the script changes gradients between two backwards"
                    " of one step: they cannot be merged."
                )
            self._is_divided = False
            _divide(self.parameters, 1 / self._steps)
        if self.merged and self._kept is None:
            self._kept = KeptGradients(self.parameters)
        self._is_read = self._is_written = False

    def _check_weights(self) -> None:
        """Raise RuntimeError if the weights have changed since the round's first gradients."""
        if not (self._weights.is_known and (self.merged or self._dirty)):
            self._weights.begin(self.parameters)
        elif self._weights.are_changed(self._trained | self._dirty):
            # Clipping after each step changes nothing once an update was clipped.
            is_clipped = self._weights.is_first_round and not self._dirty
            raise RuntimeError(_CLIPPED_WEIGHTS if is_clipped else _OTHER_WEIGHTS)

    def forget_weights(self) -> None:
        """Accept the weights as they are, since an optimizer has updated them."""
        self._weights.end()

    def finish_backward(self) -> None:
        """Show the script the averaged gradients in the last micro-step, copies in the others."""
        self._is_in_backward = False
        if not self.is_last:
            self._script = ScriptGradients()
        elif self._dirty:
            self.divide()
            if self._is_composing:
                self._averaged = copies(tensors.gradients(self.parameters))
        # Dividing reads them, too.
        self._is_read = False

    def read(self, parameter: Any, merged: Callable[[Any], Any]) -> Any:
        """Return the gradient of PARAMETER as the script sees it; MERGED returns the real one."""
        self._is_read |= not self._is_in_backward
        return merged(parameter) if self._script is None else self._script.read(parameter, merged)

    def write(self, parameter: Any, gradient: Any, assign: Callable[[Any, Any], None]) -> None:
        """Let the script replace the gradient of PARAMETER, by ASSIGN.

        Raises RuntimeError if the script composes it from gradients of several backwards.
        """
        if self._is_in_backward:
            # A hook writes it, not the script after the backward.
            assign(parameter, gradient)
            return
        if self._is_composing and gradient is not None:
            self._check_rescaled(tensors.gradients([parameter]), [gradient])
        self._is_written = True
        if self._script is None:
            assign(parameter, gradient)
        else:
            self._script.write(parameter, gradient)

    def forget(self, parameters: Sequence[Any]) -> None:
        """Record that the script clears the gradients of PARAMETERS before a step."""
        self._is_composing |= self._is_read and self.is_dirty
        self._dirty -= set(map(id, parameters))

    def drop(self, parameters: Sequence[Any], remove: Callable[[Any], None]) -> None:
        """Remove what this micro-step has added to the merged gradients of PARAMETERS.

        REMOVE leaves a parameter without a gradient.
        """
        dropped = [parameter for parameter in parameters if id(parameter) in self._dirty]
        self.forget(dropped)
        if not dropped or self._kept is None:
            return
        script, self._script = self._script, None
        if self._dirty:
            self._kept.restore(dropped, remove)
            if self._is_divided:
                _divide(dropped, self._steps)
        else:
            # The ranks have averaged the others, too, if this was the last micro-step.
            self._kept.restore(self.parameters, remove)
            self._is_divided = False
            self.cleared += 1
        self._script = None if script is None else ScriptGradients()
        self.remember_gradients()

    @border.watching(_WATCHED)
    def remember_gradients(self) -> None:
        """Remember the gradients as they are, for `is_changed`."""
        self._seen = identities(self.parameters)

    @border.watching(_WATCHED, otherwise=False)
    def is_changed(self) -> bool:
        """Whether any gradient has changed since `remember_gradients`."""
        return bool(self._seen) and self._seen != identities(self.parameters)

    def divide(self) -> None:
        """Divide the merged gradients, once in each round."""
        if self._is_divided or not self._averages:
            return
        self._is_divided = True
        _divide(self.parameters, self._steps)
        for gradient in self.reduced_gradients():
            gradient.scale_(1.0 / self._steps)

    def start_round(self) -> None:
        """Reset after an update."""
        self.merged = 0
        self.steps_unscheduled += 1
        self._is_divided = False
        self._script = None
        self._weights.end()
        self._end_micro_step()
        self.is_updated = True
        self._seen = []


class GradientMerge:
    """The accumulators of all optimizers of this process."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        # By the id of the optimizer, which holds its accumulator.
        self._accumulators: weakref.WeakValueDictionary[int, GradientAccumulator] = (
            weakref.WeakValueDictionary()
        )
        # By the id of a parameter. The newest comes last: a script may replace its optimizer.
        self._owners: dict[int, list[weakref.ref[GradientAccumulator]]] = {}
        # The most micro-steps of a partial round that were lost with an optimizer.
        self._dropped = 0
        # All steps of all optimizers, merged or updating.
        self.steps = 0
        # Returns the number of allreduces so far.
        self.count_calls: Callable[[], int] = lambda: 0
        self._calls_before = 0
        # The allreduces that the script or Paddle's Python has made: so far, before this round,
        # and before the end of the last backward.
        self.other_calls = self._others_before = self._others_in_backward = 0
        # The ids of the parameters whose gradients Paddle reduces in each backward.
        self.reduced: set[int] = set()
        # Other parts of this job that merge, for the report.
        self.hint = ""
        # Whether steps are patched.
        self.is_installed = False
        # The device of some rank cannot merge.
        self._is_withdrawn = False

    def of(self, optimizer: Any) -> GradientAccumulator | None:
        """Return the accumulator of OPTIMIZER, Paddle's or fleet's; None if it does not merge."""
        import paddle

        optimizer = unwrap(optimizer)
        if self._is_withdrawn or not paddle.in_dynamic_mode():
            return None
        if not getattr(optimizer, "_parameter_list", None) or type(optimizer).__name__ == _STAGE_2:
            return None
        if updates.is_model_average(type(optimizer)):
            return None
        accumulator = self._accumulators.get(id(optimizer))
        if accumulator is None or accumulator.optimizer is not optimizer:
            spec = settings.effective_spec()
            accumulator = GradientAccumulator(
                optimizer, spec.merge_steps, averages=spec.merge_averages
            )
            self._accumulators[id(optimizer)] = accumulator
            optimizer.__dict__[_HELD_BY_OPTIMIZER] = accumulator
            accumulator.on_gone = self._count_dropped
            self._own(accumulator)
        return accumulator

    def withdraw(self) -> None:
        """Merge nothing; called before the first step."""
        self.is_installed, self._is_withdrawn = False, True
        self._accumulators.clear()
        self._owners.clear()

    def keep_whole(self, optimizer: Any) -> None:
        """Merge the gradients of all parameters of OPTIMIZER, which is about to get its share."""
        optimizer = unwrap(optimizer)
        optimizer.__dict__[_WHOLE] = updates.parameters_of(optimizer)

    def keep_reduced(self, optimizer: Any, gradients: Callable[[], Sequence[Any]]) -> None:
        """Merge GRADIENTS of OPTIMIZER, which Paddle reduces in each backward."""
        optimizer = unwrap(optimizer)
        self.reduced |= set(map(id, updates.parameters_of(optimizer)))
        optimizer.__dict__[_WHOLE] = ()
        accumulator = self._accumulators.pop(id(optimizer), None)
        for owners in self._owners.values():
            owners[:] = [owner for owner in owners if owner() is not accumulator]
        accumulator = self.of(optimizer)
        if accumulator is not None:
            accumulator.reduced_gradients = gradients

    def give_up(self, reason: str) -> None:
        """Merge nothing and report REASON; called before the first step."""
        self.withdraw()
        self._report_fields(NO_EFFECT, reason=reason)

    def _report_fields(self, status: str, **more: Any) -> None:
        for name in _FIELDS:
            if self._spec.get(name) is not None:
                self._proof.knob(name, status, **more)

    def _own(self, accumulator: GradientAccumulator) -> None:
        """Make ACCUMULATOR the newest owner of its parameters."""
        for parameter in accumulator.parameters:
            owners = self._owners.setdefault(id(parameter), [])
            owners[:] = [owner for owner in owners if owner() not in (None, accumulator)]
            owners.append(weakref.ref(accumulator))

    def _update_settings(self) -> None:
        """Adopt the settings in effect, which the script may set after its optimizer."""
        if not self.steps:
            spec = settings.effective_spec()
            for accumulator in self._accumulators.values():
                accumulator.set_steps(spec.merge_steps, averages=spec.merge_averages)

    def all(self) -> list[GradientAccumulator]:
        """Return every accumulator."""
        return list(self._accumulators.values())

    def _count_dropped(self, steps: int) -> None:
        self._dropped = max(self._dropped, steps)

    def owners(self, parameters: Sequence[Any]) -> list[GradientAccumulator]:
        """Return the accumulators of PARAMETERS, each once."""
        newest = [self._owners_of(parameter)[-1:] for parameter in parameters]
        return list({id(owner): owner for owners in newest for owner in owners}.values())

    def _owners_of(self, parameter: Any) -> list[GradientAccumulator]:
        """Return the accumulators of PARAMETER whose optimizers live, the newest last."""
        references = self._owners.get(id(parameter), ())
        return [owner for reference in references if (owner := reference()) is not None]

    def must_sync(self, parameters: Sequence[Any]) -> bool:
        """Whether this backward must average the gradients of PARAMETERS over the ranks.

        Not if a later step of the round will use all of them. A parameter without a known optimizer
        may be used at any time. Averaging once too often does no harm.
        """
        if not self._accumulators:
            return True
        self._update_settings()
        owners = [self._owners_of(parameter) for parameter in parameters]
        return any(not several or any(owner.is_last for owner in several) for several in owners)

    def report_own_updates(self, updater: str) -> None:
        """Report that UPDATER, no optimizer of Paddle's, updates the weights.

        Raises RuntimeError if there is an optimizer of Paddle's, whose gradients are merged.
        """
        if self._accumulators:
            kinds = ", ".join(
                sorted({type(accumulator.optimizer).__name__ for accumulator in self.all()})
            )
            raise RuntimeError(
                f"fleetrun: gradient_merge: {updater} updates the weights itself and never calls"
                f" step of the optimizer ({kinds}), so nothing can be merged: use the strategy"
                " without gradient_merge."
            )
        reason = f"{updater} updates the weights, and no optimizer of Paddle's has stepped"
        self._report_fields(NO_EFFECT, reason=reason)

    def step(self, current: GradientAccumulator, update: Callable[[], Any]) -> Any:
        """Merge the gradients of CURRENT, or call UPDATE if its round is complete."""
        if current.is_updating:
            return update()
        self._update_settings()
        self.steps += 1
        self._take_over(current)
        current.check_step()
        if not current.is_last:
            self._note_changes(current)
            current.merge()
            return None
        current.divide()
        self._report(current)
        current.is_updating = True
        try:
            result = update()
        finally:
            current.is_updating = False
        current.start_round()
        updated = set(map(id, current.parameters))
        for accumulator in self.all():
            if not updated.isdisjoint(map(id, accumulator.parameters)):
                accumulator.forget_weights()
        return result

    # As a listener of backward.

    def begin(self) -> None:
        """Prepare the gradients for a backward.

        Raises RuntimeError if the script has changed gradients in a way that cannot be merged.
        """
        for current in self.all():
            if current.takes_new_parameters():
                self._own(current)
            if current in self._watched() and current.merged and current.is_changed():
                raise RuntimeError(
                    _CHANGED_AFTER_STEP if not self._shares(current) else _TWO_OPTIMIZERS
                )
            if not current.is_updating:
                current.begin_backward()

    def _take_over(self, current: GradientAccumulator) -> None:
        """Make CURRENT the newest owner of its parameters.

        Raises RuntimeError if another accumulator has merged gradients of them.
        """
        others = [accumulator for accumulator in self.all() if accumulator is not current]
        if not others:
            return
        parameters = set(map(id, current.parameters))
        for other in others:
            if other.merged and not parameters.isdisjoint(map(id, other.parameters)):
                raise RuntimeError(_TWO_OPTIMIZERS)
        self._own(current)

    def _shares(self, current: GradientAccumulator) -> bool:
        """Whether another optimizer also updates parameters of CURRENT."""
        return any(len(self._owners_of(parameter)) > 1 for parameter in current.parameters)

    def finish(self) -> None:
        """Show the script its gradients, and remember them."""
        for current in self.all():
            if not current.is_updating:
                current.finish_backward()
                current.remember_gradients()
        self._others_in_backward = self.other_calls

    # A backward that has raised is over, too.
    abandon = finish

    def read(self, parameter: Any, merged: Callable[[Any], Any]) -> Any:
        """Return the gradient of PARAMETER as the script sees it; MERGED returns the real one."""
        owners = self._owners_of(parameter)
        return owners[-1].read(parameter, merged) if owners else merged(parameter)

    def write(self, parameter: Any, gradient: Any, assign: Callable[[Any, Any], None]) -> None:
        """Let the script set the gradient of PARAMETER, by ASSIGN."""
        owners = self._owners_of(parameter)
        if owners:
            owners[-1].write(parameter, gradient, assign)
        else:
            assign(parameter, gradient)

    def _watched(self) -> list[GradientAccumulator]:
        return self.all() if self.steps < _WATCHED_STEPS else []

    def _note_changes(self, current: GradientAccumulator) -> None:
        """Note if the script has changed gradients between backward and step."""
        if current in self._watched():
            # Averaging an average over the ranks again changes nothing.
            if current.is_changed() and self.other_calls == self._others_in_backward:
                self._proof.note(
                    "the script changes gradients between backward and step through references"
                    " that it holds: with gradient_merge it changes the sum so far at each"
                    " micro-step, which equals a larger batch only if repeating the change has no"
                    " effect, as with a mask"
                )
            current.remember_gradients()

    def average(self, parameters: Sequence[Any], step: Callable[[], Any]) -> Any:
        """Call STEP, which averages PARAMETERS, if they have been updated."""
        return step() if all(owner.is_updated for owner in self.owners(parameters)) else None

    def step_scaled(self, current: GradientAccumulator, update: Callable[[], Any]) -> Any:
        """Call UPDATE, a step of GradScaler, which steps only if all gradients are finite."""
        result = update()
        if current.merged:
            # GradScaler has found an infinity: the round is lost, as a large batch would be.
            current.start_round()
        return result

    def clear(
        self, parameters: Sequence[Any], clear: Callable[[], Any], remove: Callable[[Any], None]
    ) -> Any:
        """Call CLEAR, which clears the gradients of PARAMETERS, unless they are being merged.

        Merged gradients lose only what this micro-step has added. REMOVE leaves a parameter
        without a gradient.
        """
        owners = [owner for owner in self.owners(parameters) if not owner.is_updating]
        merging = [owner for owner in owners if owner.merged]
        if not merging:
            for current in owners:
                current.forget(parameters)
            return clear()
        kept = {id(parameter) for current in merging for parameter in current.parameters}
        for parameter in parameters:
            if id(parameter) not in kept:
                remove(parameter)
        for current in merging:
            current.drop(parameters, remove)
        return None

    @border.watching("the count of merged micro-steps")
    def _report(self, current: GradientAccumulator) -> None:
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
        if self.reduced:
            text += "; Paddle reduces in each backward, so each rank keeps its share only"
        text += self.hint
        for name in _FIELDS:
            if self._spec.get(name) is None:
                continue
            value = settings.effective(name)
            if settings.script_wins(name):
                reason = "the script sets it itself"
                self._proof.knob(name, SCRIPT, in_effect=value, reason=reason, evidence=text)
            elif steps > 1:
                self._proof.knob(name, EFFECTIVE, in_effect=value, evidence=text)
            else:
                reason = "one micro-step makes an update"
                self._proof.knob(name, NO_EFFECT, reason=reason, evidence=text)

    @border.watching("the count of merged micro-steps")
    def report_partial_rounds(self) -> None:
        """Note the micro-steps that were dropped in partial rounds, or cleared."""
        cleared = sum(accumulator.cleared for accumulator in self.all())
        if cleared:
            text = "were cleared before a step, and did not count (gradient_merge)"
            self._proof.note(f"{plural(cleared, 'micro-step')} {text}")
        count = max(self._dropped, *(accumulator.merged for accumulator in self.all()), 0)
        if count:
            were = "was" if count == 1 else "were"
            self._proof.note(f"{plural(count, 'micro-step')} of a partial round {were} dropped")
        if cleared or count:
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


def _parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters whose gradients OPTIMIZER merges, whichever rank updates them."""
    whole = optimizer.__dict__.get(_WHOLE)
    return updates.parameters_of(optimizer) if whole is None else list(whole)


def _divide(parameters: Sequence[Any], divisor: float) -> None:
    import paddle

    with paddle.no_grad():
        for parameter in parameters:
            # Mixed precision may keep the gradient in fp32 beside the parameter.
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is None:
                continue
            if gradient.is_selected_rows():
                gradient = tensors.sparse_values(gradient)
            gradient.scale_(1.0 / divisor)
