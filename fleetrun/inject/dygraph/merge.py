"""Merges the gradients of several micro-steps into one update.

A round is `k_steps` calls of `optimizer.step()` (or `minimize`, or the same through GradScaler).
All but the last do nothing: gradients go on accumulating in `parameter.grad`, `clear_grad` is kept
from discarding them, and the models skip their allreduces. In the last one the gradients are
averaged over the ranks, divided by `k_steps` (with `avg`), clipped, regularised and applied.

* A scheduler of the learning rate that is stepped with the optimizer advances once per update; one
  that is stepped once in several steps (per epoch) advances whenever the script says so.
* GradScaler unscales, looks for infinities and updates its scale at the last step only.
* `merge_tail=step`: what is left of a round when a `paddle.io.DataLoader` has come to its end is
  applied there, divided by the number of micro-steps that it has. Every rank comes there: they meet
  before the allreduce, and say who does not. `state_dict` and `save`, which only one rank may call,
  are no such places. `drop`: it is left, and the proof says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import settings, updates
from ..evidence import EFFECTIVE, NO_EFFECT, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..evidence import Evidence
    from ..wish import Wish


# In how many micro-steps the script is watched: what it does to gradients, it does at once.
_WATCHED = 8


class Round:
    """What one optimizer has merged since its last update."""

    def __init__(self, optimizer: Any, steps: int, *, averages: bool) -> None:
        self.optimizer = optimizer
        # What the script calls: an optimizer may be in others.
        self.outermost = optimizer
        self.settle_steps(steps, averages=averages)
        self.parameters = flat(optimizer._parameter_list)
        # Micro-steps that were skipped since the last update.
        self.skipped = 0
        # The update is being made; steps within it are parts of it.
        self.is_updating = False
        # A backward has added gradients that no step has seen.
        self.is_dirty = False
        self._is_settled = False
        # How the gradients were when nobody but the script could change them any more.
        self._seen: list[tuple[int, int] | None] = []
        # Whether the script has given a parameter another gradient since, which keeps its place.
        self.is_replaced = False
        # For schedulers: steps since the last one of theirs, and what the last one did.
        self.steps_unscheduled = 0
        self.is_updated = True
        # The GradScaler that the script steps with.
        self.scaler: Any = None
        # What the script does before a step and after it, withheld until there is an update; by
        # what it does it with.
        self.before: dict[object, Callable[[], Any]] = {}
        self.after: dict[object, Callable[[], Any]] = {}
        for parameter in self.parameters:
            if not parameter.stop_gradient:
                parameter._register_backward_hook(self._spoil)

    def settle_steps(self, steps: int, *, averages: bool) -> None:
        """Merge STEPS micro-steps into an update, and divide if that AVERAGES."""
        self._steps = self._divisor = steps
        self._averages = averages

    def _spoil(self, *_: Any) -> None:
        self.is_dirty = True

    @property
    def is_last(self) -> bool:
        """Whether the next step updates the parameters."""
        return self.skipped + 1 >= self._steps

    def skip(self) -> None:
        """Merge a micro-step."""
        self.skipped += 1
        self.steps_unscheduled += 1
        self.is_dirty = self.is_updated = False

    def look(self) -> None:
        """Remember the gradients as they are: the next look at them will tell of changes."""
        self._seen = _identities(self.parameters)
        self.is_replaced = False

    def is_changed(self) -> bool:
        """Whether any gradient is not what it was at the last look."""
        if not self._seen:
            return False
        return self.is_replaced or self._seen != _identities(self.parameters)

    def settle(self) -> None:
        """Divide the merged gradients; once."""
        if self._is_settled or not self._averages:
            return
        self._is_settled = True
        _divide(self.parameters, self._divisor)

    def end(self) -> None:
        """Begin the next round."""
        self.skipped = 0
        self.steps_unscheduled += 1
        self.is_dirty = self._is_settled = False
        self.is_updated = True
        self._seen = []
        self._divisor = self._steps
        self.scaler = None
        self.before, self.after = {}, {}

    def cut_short(self) -> None:
        """Make the next step the last, for the micro-steps that are there."""
        self._divisor = self.skipped
        self.skipped = self._steps - 1


class Rounds:
    """The rounds of all optimizers of this process."""

    def __init__(self, asked: Wish, proof: Evidence) -> None:
        self._asked = asked
        self._proof = proof
        self._rounds: dict[int, Round] = {}
        # The newest comes last: a script may make another optimizer, and let the first be.
        self._owners: dict[int, list[Round]] = {}
        # All steps of all optimizers, merged or real.
        self.steps = 0
        # How many allreduces there were, ever; and up to the last update.
        self.count_calls: Callable[[], int] = lambda: 0
        self._calls = 0
        # How often a partial round was applied after all.
        self.tails = 0

    def of(self, optimizer: Any) -> Round | None:
        """Return the round of OPTIMIZER; None where there is nothing to merge for it."""
        import paddle

        optimizer = unwrap(optimizer)
        if not paddle.in_dynamic_mode() or not getattr(optimizer, "_parameter_list", None):
            return None
        if updates.only_averages(type(optimizer)):
            return None
        known = self._rounds.get(id(optimizer))
        if known is None:
            settled = settings.settled()
            known = Round(optimizer, settled.merge_steps, averages=settled.merge_averages)
            self._rounds[id(optimizer)] = known
            for parameter in known.parameters:
                self._owners.setdefault(id(parameter), []).append(known)
        return known

    def _settle(self) -> None:
        """Hear how many micro-steps the script wants, which it may say after its optimizer."""
        if not self.steps:
            settled = settings.settled()
            for each in self._rounds.values():
                each.settle_steps(settled.merge_steps, averages=settled.merge_averages)

    def all(self) -> Iterator[Round]:
        """Return every round."""
        return iter(list(self._rounds.values()))

    def owners(self, parameters: Sequence[Any]) -> list[Round]:
        """Return the rounds to which PARAMETERS belong."""
        owners = [self._owners[key][-1] for key in map(id, parameters) if key in self._owners]
        return list({id(each): each for each in owners}.values())

    def must_sync(self, parameters: Sequence[Any]) -> bool:
        """Whether gradients of PARAMETERS must be averaged over the ranks in this backward.

        They need not while all of them wait for a later step; an optimizer that nobody knows may
        use them at any time. One time too many does no harm.
        """
        if not self._rounds:
            return True
        self._settle()
        owners = [self._owners.get(id(parameter), ()) for parameter in parameters]
        return any(not each or any(owner.is_last for owner in each) for each in owners)

    def step(self, current: Round, update: Callable[[], Any], by: Any = None) -> Any:
        """Merge the gradients of the round CURRENT, or UPDATE with them if it is complete.

        BY is what the script calls.
        """
        if current.is_updating:
            return update()
        self._settle()
        self.steps += 1
        if not current.is_last:
            self._watch_step(current)
            current.skip()
            current.outermost = by or current.optimizer
            return None
        current.settle()
        self._prove(current)
        current.is_updating = True
        try:
            result = update()
        finally:
            current.is_updating = False
        current.end()
        return result

    # As a listener of backward: what the script does between two of them, and must not.

    def begin(self) -> None:
        """See that what was merged is still there."""
        for current in self._watched():
            if current.skipped and current.is_changed():
                message = (
                    "fleetrun: gradient_merge: after a step the script changes or drops gradients"
                    " by itself, while they are being merged: let it call clear_grad() instead."
                )
                raise RuntimeError(message)

    def finish(self) -> None:
        """Look at what backward has made."""
        for current in self._watched():
            current.look()

    def abandon(self) -> None:
        """Take what a backward that failed has left as it is."""
        self.finish()

    def replace(self, parameter: Any) -> None:
        """Hear that the script gives PARAMETER another gradient."""
        for current in self.owners([parameter]):
            current.is_replaced = True

    def _watched(self) -> list[Round]:
        return list(self._rounds.values()) if self.steps < _WATCHED else []

    def _watch_step(self, current: Round) -> None:
        """Say it if the script itself has changed gradients since backward made them."""
        if current not in self._watched():
            return
        if current.is_changed():
            self._proof.note(
                "the script changes gradients between backward and step: with gradient_merge it"
                " changes the sum so far, at each micro-step, and not what a larger batch gives"
            )
        current.look()

    def average(self, parameters: Sequence[Any], key: int, step: Callable[[], Any]) -> Any:
        """STEP for who averages PARAMETERS, and is known as KEY, if they have been updated."""
        waiting = [each for each in self.owners(parameters) if not each.is_updated]
        for each in waiting:
            each.after[key] = step
        return None if waiting else step()

    def complete(self, current: Round, update: Callable[[], Any]) -> Any:
        """UPDATE through a GradScaler, which steps only if all gradients are finite."""
        result = update()
        if current.skipped:
            # It found an infinity: the round is lost, as a large batch would be.
            current.end()
        return result

    def pending(self, parameters: Sequence[Any]) -> Round | None:
        """Return a round that merges gradients of PARAMETERS; first one that would lose some."""
        pending = [each for each in self.owners(parameters) if each.skipped]
        return next((each for each in pending if each.is_dirty), pending[0] if pending else None)

    def clear(self, current: Round | None, clear: Callable[[], Any]) -> Any:
        """CLEAR the gradients of CURRENT, unless they are being merged."""
        if current is None or not current.skipped:
            return clear()
        if current.is_dirty:
            message = (
                "fleetrun: gradient_merge: the script clears gradients that no optimizer step has"
                " used, while others are being merged with them: this cannot be merged."
            )
            raise RuntimeError(message)
        return None

    def _prove(self, current: Round) -> None:
        calls = self.count_calls()
        made, self._calls = calls - self._calls, calls
        steps = current.skipped + 1
        self._proof.graph = "dygraph"
        self._proof.counts["merged_steps"] = steps
        text = (
            f"{steps} micro-steps made one update; {made} allreduce{'s' * (made != 1)} among them"
        )
        merges = steps > 1
        for name in ("gradient_merge", "gradient_merge_configs"):
            if self._asked.get(name) is None:
                continue
            holds = settings.effective(name)
            if settings.is_scripts(name):
                reason = "the script sets it itself"
                self._proof.knob(name, SCRIPT, in_effect=holds, reason=reason, evidence=text)
            elif merges:
                self._proof.knob(name, EFFECTIVE, in_effect=holds, evidence=text)
            else:
                reason = "one micro-step makes an update"
                self._proof.knob(name, NO_EFFECT, reason=reason, evidence=text)

    def say_what_is_left(self) -> None:
        """Note partial rounds: those that were applied, and micro-steps that never were."""
        if self.tails:
            rounds = "round was" if self.tails == 1 else "rounds were"
            where = "at the end of a paddle.io.DataLoader (merge_tail=step)"
            self._proof.note(f"{self.tails} partial {rounds} applied {where}")
            self._proof.write()
        left = [each.skipped for each in self.all() if each.skipped]
        if left:
            tail = self._asked.merge_tail
            count = max(left)
            steps, were = ("micro-step", "was") if count == 1 else ("micro-steps", "were")
            text = f"{count} {steps} of a partial round {were} dropped (merge_tail={tail}"
            if tail == "step":
                text += ": they were not at the end of a paddle.io.DataLoader"
            self._proof.note(f"{text})")
            self._proof.write()


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer in fleet's wrappers, or in LookAhead."""
    while True:
        parts = getattr(optimizer, "__dict__", {})
        inner = parts.get("_inner_opt", parts.get("inner_optimizer"))
        if inner is None:
            return optimizer
        optimizer = inner


def flat(parameters: Any) -> list[Any]:
    """Return PARAMETERS without their groups."""
    found: list[Any] = []
    for each in parameters or ():
        found += each["params"] if isinstance(each, dict) else [each]
    return found


def _identities(parameters: Sequence[Any]) -> list[tuple[int, int] | None]:
    """Tell where each gradient is, and how often it was changed in place; None: there is none."""
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
            # Mixed precision may keep them beside the parameter.
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is None:
                continue
            if gradient.is_selected_rows():
                gradient = paddle.base.core.eager.Tensor(gradient.get_selected_rows().get_tensor())
            gradient.scale_(1.0 / divisor)
