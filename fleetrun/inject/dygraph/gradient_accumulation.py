"""Merges the gradients of several micro-steps into one update.

A round is `k_steps` calls of `optimizer.step()` (or `minimize`, or the same through GradScaler).
All calls but the last do nothing: gradients accumulate in `parameter.grad`, `clear_grad` does not
discard them, and the models skip their allreduces. The last call averages the gradients over the
ranks, divides them by `k_steps` (with `avg`), clips, regularises and applies them.

* A learning rate scheduler that is stepped with the optimizer advances once per update. One that is
  stepped once in several steps (per epoch) advances whenever the script steps it.
* GradScaler unscales, looks for infinities and updates its scale at the last step only.
* `merge_tail=step`: a partial round at the end of a `paddle.io.DataLoader` is applied there,
  divided by its number of micro-steps. Every rank must get there: the ranks check that before the
  allreduce. `state_dict` and `save` apply nothing, as one rank alone may call them.
  `merge_tail=drop`: a partial round is dropped, and the proof says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import settings, updates
from ..evidence import EFFECTIVE, NO_EFFECT, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..evidence import Evidence
    from ..spec import StrategySpec


# The number of micro-steps in which the script's changes of gradients are looked for.
_WATCHED_STEPS = 8


class GradientAccumulator:
    """The gradients that one optimizer has merged since its last update."""

    def __init__(self, optimizer: Any, steps: int, *, averages: bool) -> None:
        self.optimizer = optimizer
        # The optimizer whose `step` the script calls: one may contain another.
        self.outermost = optimizer
        self.set_steps(steps, averages=averages)
        self.parameters = without_groups(optimizer._parameter_list)
        # Micro-steps that were merged since the last update.
        self.merged = 0
        # The update is under way; steps within it are parts of it.
        self.is_updating = False
        # A backward has added gradients that no step has seen.
        self.is_dirty = False
        self._is_divided = False
        # The gradients after the last backward or step; see `_identities`.
        self._seen: list[tuple[int, int] | None] = []
        # The script has assigned a gradient since, which `_seen` does not show.
        self.is_replaced = False
        # For schedulers: the steps since a scheduler's last step, and whether the last one updated.
        self.steps_unscheduled = 0
        self.is_updated = True
        # The GradScaler that the script steps with.
        self.scaler: Any = None
        # What the script did before and after a step, postponed to the update. The keys tell what
        # it was, so that each is done once.
        self.before: dict[object, Callable[[], Any]] = {}
        self.after: dict[object, Callable[[], Any]] = {}
        for parameter in self.parameters:
            if not parameter.stop_gradient:
                parameter._register_backward_hook(self._mark_dirty)

    def set_steps(self, steps: int, *, averages: bool) -> None:
        """Merge STEPS micro-steps into an update; divide by them if it AVERAGES."""
        self._steps = self._divisor = steps
        self._averages = averages

    def _mark_dirty(self, *_: Any) -> None:
        self.is_dirty = True

    @property
    def is_last(self) -> bool:
        """Whether the next step updates the parameters."""
        return self.merged + 1 >= self._steps

    def merge(self) -> None:
        """Count a step that updates nothing."""
        self.merged += 1
        self.steps_unscheduled += 1
        self.is_dirty = self.is_updated = False

    def remember_gradients(self) -> None:
        """Remember the gradients as they are, for `is_changed`."""
        self._seen = _identities(self.parameters)
        self.is_replaced = False

    def is_changed(self) -> bool:
        """Whether any gradient has changed since `remember_gradients`."""
        if not self._seen:
            return False
        return self.is_replaced or self._seen != _identities(self.parameters)

    def divide(self) -> None:
        """Divide the merged gradients, once in each round."""
        if self._is_divided or not self._averages:
            return
        self._is_divided = True
        _divide(self.parameters, self._divisor)

    def start_round(self) -> None:
        """Reset after an update."""
        self.merged = 0
        self.steps_unscheduled += 1
        self.is_dirty = self._is_divided = False
        self.is_updated = True
        self._seen = []
        self._divisor = self._steps
        self.scaler = None
        self.before, self.after = {}, {}

    def cut_short(self) -> None:
        """Make the next step the last, and divide by the micro-steps so far."""
        self._divisor = self.merged
        self.merged = self._steps - 1


class GradientMerge:
    """The accumulators of all optimizers of this process."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        self._accumulators: dict[int, GradientAccumulator] = {}
        # By the id of a parameter. The newest comes last: a script may replace its optimizer.
        self._owners: dict[int, list[GradientAccumulator]] = {}
        # All steps of all optimizers, merged or updating.
        self.steps = 0
        # Returns the number of allreduces so far.
        self.count_calls: Callable[[], int] = lambda: 0
        self._calls_before = 0
        # Partial rounds that were applied.
        self.tails = 0

    def of(self, optimizer: Any) -> GradientAccumulator | None:
        """Return the accumulator of OPTIMIZER, Paddle's or fleet's; None if it does not merge."""
        import paddle

        optimizer = unwrap(optimizer)
        if not paddle.in_dynamic_mode() or not getattr(optimizer, "_parameter_list", None):
            return None
        if updates.is_model_average(type(optimizer)):
            return None
        known = self._accumulators.get(id(optimizer))
        if known is None:
            spec = settings.effective_spec()
            known = GradientAccumulator(optimizer, spec.merge_steps, averages=spec.merge_averages)
            self._accumulators[id(optimizer)] = known
            for parameter in known.parameters:
                self._owners.setdefault(id(parameter), []).append(known)
        return known

    def _update_settings(self) -> None:
        """Take over the settings in effect, which the script may set after its optimizer."""
        if not self.steps:
            spec = settings.effective_spec()
            for each in self._accumulators.values():
                each.set_steps(spec.merge_steps, averages=spec.merge_averages)

    def all(self) -> list[GradientAccumulator]:
        """Return every accumulator."""
        return list(self._accumulators.values())

    def owners(self, parameters: Sequence[Any]) -> list[GradientAccumulator]:
        """Return the accumulators of PARAMETERS, each once."""
        owners = [self._owners[key][-1] for key in map(id, parameters) if key in self._owners]
        return list({id(each): each for each in owners}.values())

    def must_sync(self, parameters: Sequence[Any]) -> bool:
        """Whether this backward must average the gradients of PARAMETERS over the ranks.

        Not if a later step of the round will use all of them. A parameter without a known optimizer
        may be used at any time. Averaging once too often does no harm.
        """
        if not self._accumulators:
            return True
        self._update_settings()
        owners = [self._owners.get(id(parameter), ()) for parameter in parameters]
        return any(not each or any(owner.is_last for owner in each) for each in owners)

    def step(
        self, current: GradientAccumulator, update: Callable[[], Any], outermost: Any = None
    ) -> Any:
        """Merge the gradients of CURRENT, or call UPDATE if its round is complete.

        OUTERMOST is the optimizer whose `step` the script calls.
        """
        if current.is_updating:
            return update()
        self._update_settings()
        self.steps += 1
        if not current.is_last:
            self._note_changes(current)
            current.merge()
            current.outermost = outermost or current.optimizer
            return None
        current.divide()
        self._report(current)
        current.is_updating = True
        try:
            result = update()
        finally:
            current.is_updating = False
        current.start_round()
        return result

    # As a listener of backward: finds what the script does to gradients between two of them.

    def begin(self) -> None:
        """Raise RuntimeError if the script has changed merged gradients."""
        for current in self._watched():
            if current.merged and current.is_changed():
                message = (
                    "fleetrun: gradient_merge: after a step the script changes or drops gradients"
                    " by itself, while they are being merged: let it call clear_grad() instead."
                )
                raise RuntimeError(message)

    def finish(self) -> None:
        """Remember the gradients that backward has computed."""
        for current in self._watched():
            current.remember_gradients()

    def abandon(self) -> None:
        """Remember the gradients of a backward that has raised."""
        self.finish()

    def on_assigned(self, parameter: Any) -> None:
        """Record that the script assigns the gradient of PARAMETER."""
        for current in self.owners([parameter]):
            current.is_replaced = True

    def _watched(self) -> list[GradientAccumulator]:
        return self.all() if self.steps < _WATCHED_STEPS else []

    def _note_changes(self, current: GradientAccumulator) -> None:
        """Note if the script has changed gradients between backward and step."""
        if current not in self._watched():
            return
        if current.is_changed():
            self._proof.note(
                "the script changes gradients between backward and step: with gradient_merge it"
                " changes the sum so far, at each micro-step, and not what a larger batch gives"
            )
        current.remember_gradients()

    def average(self, parameters: Sequence[Any], key: int, step: Callable[[], Any]) -> Any:
        """Call STEP, which averages PARAMETERS, now or after their next update.

        KEY tells the ModelAverage, so that it averages once per update.
        """
        waiting = [each for each in self.owners(parameters) if not each.is_updated]
        for each in waiting:
            each.after[key] = step
        return None if waiting else step()

    def step_scaled(self, current: GradientAccumulator, update: Callable[[], Any]) -> Any:
        """Call UPDATE, a step of GradScaler, which steps only if all gradients are finite."""
        result = update()
        if current.merged:
            # It has found an infinity: the round is lost, as a large batch would be.
            current.start_round()
        return result

    def merging(self, parameters: Sequence[Any]) -> GradientAccumulator | None:
        """Return an accumulator that is merging gradients of PARAMETERS, a dirty one first."""
        found = [each for each in self.owners(parameters) if each.merged]
        return next((each for each in found if each.is_dirty), found[0] if found else None)

    def clear(self, current: GradientAccumulator | None, clear: Callable[[], Any]) -> Any:
        """Call CLEAR, which clears the gradients of CURRENT, unless they are being merged.

        Raises RuntimeError if that would lose gradients that no step has seen.
        """
        if current is None or not current.merged:
            return clear()
        if current.is_dirty:
            message = (
                "fleetrun: gradient_merge: the script clears gradients that no optimizer step has"
                " used, while others are being merged with them: this cannot be merged."
            )
            raise RuntimeError(message)
        return None

    def _report(self, current: GradientAccumulator) -> None:
        calls = self.count_calls()
        allreduces, self._calls_before = calls - self._calls_before, calls
        steps = current.merged + 1
        self._proof.graph = "dygraph"
        self._proof.counts["merged_steps"] = steps
        text = (
            f"{steps} micro-steps made one update;"
            f" {allreduces} allreduce{'s' * (allreduces != 1)} among them"
        )
        for name in ("gradient_merge", "gradient_merge_configs"):
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

    def report_partial_rounds(self) -> None:
        """Note the partial rounds that were applied, and the micro-steps that were dropped."""
        if self.tails:
            rounds = "round was" if self.tails == 1 else "rounds were"
            where = "at the end of a paddle.io.DataLoader (merge_tail=step)"
            self._proof.note(f"{self.tails} partial {rounds} applied {where}")
            self._proof.write()
        count = max((each.merged for each in self.all()), default=0)
        if count:
            tail = self._spec.merge_tail
            steps, were = ("micro-step", "was") if count == 1 else ("micro-steps", "were")
            text = f"{count} {steps} of a partial round {were} dropped (merge_tail={tail}"
            if tail == "step":
                text += ": they were not at the end of a paddle.io.DataLoader"
            self._proof.note(f"{text})")
            self._proof.write()


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of fleet and LookAhead."""
    while True:
        parts = getattr(optimizer, "__dict__", {})
        inner = parts.get("_inner_opt", parts.get("inner_optimizer"))
        if inner is None:
            return optimizer
        optimizer = inner


def without_groups(parameters: Any) -> list[Any]:
    """Return the parameters of an optimizer's list, which may consist of groups."""
    found: list[Any] = []
    for each in parameters or ():
        found += each["params"] if isinstance(each, dict) else [each]
    return found


def _identities(parameters: Sequence[Any]) -> list[tuple[int, int] | None]:
    """Return address and in-place version of each dense gradient; None for others."""
    found: list[tuple[int, int] | None] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.is_selected_rows():
            found.append(None)
        else:
            found.append((gradient.data_ptr(), gradient.inplace_version))
    return found


def _divide(parameters: Sequence[Any], divisor: int) -> None:
    import paddle

    with paddle.no_grad():
        for parameter in parameters:
            # Mixed precision may keep the gradient in fp32 beside the parameter.
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is None:
                continue
            if gradient.is_selected_rows():
                gradient = paddle.base.core.eager.Tensor(gradient.get_selected_rows().get_tensor())
            gradient.scale_(1.0 / divisor)
