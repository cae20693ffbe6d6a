"""Merges the gradients of several micro-steps into one update, for all optimizers of a process.

A round is `k_steps` calls of `optimizer.step()` (or `minimize`, or the same through GradScaler).
All calls but the last update nothing, and the models send nothing. What cannot equal the larger
batch ends the job with one sentence, before an update. A partial round is dropped, and the report
says so.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from .. import border, settings, updates
from ..evidence import EFFECTIVE, NO_EFFECT, SCRIPT, Evidence, plural
from .merge_round import SHARED, MergeRound, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..spec import StrategySpec

_FIELDS = ("gradient_merge", "gradient_merge_configs")


class GradientMerge:
    """The rounds of all optimizers of this process; notified of every backward."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        # By the id of the optimizer, in the order of creation: a script may replace its optimizer.
        self._rounds: dict[int, MergeRound] = {}
        self._has_stepped = False
        # Whether an optimizer was made in a round of another one, which it may replace.
        self._may_replace = False

    def of(self, optimizer: Any) -> MergeRound | None:
        """Return the round of OPTIMIZER, Paddle's or fleet's; None if it does not merge."""
        import paddle

        *_, optimizer = updates.chain(optimizer)
        merges = paddle.in_dynamic_mode() and getattr(optimizer, "_parameter_list", None)
        if not merges or updates.is_model_average(type(optimizer)):
            return None
        current = self._rounds.get(id(optimizer))
        if current is None:
            self._may_replace |= any(other.merged for other in self.all())
            current = self._rounds[id(optimizer)] = MergeRound(optimizer)
            weakref.finalize(optimizer, self._rounds.pop, id(optimizer), None).atexit = False
            current.adopt()
        return current

    def all(self) -> list[MergeRound]:
        """Return the rounds of all optimizers that live."""
        return list(self._rounds.values())

    def _adopt_settings(self) -> None:
        """Adopt what the script sets after it has made its optimizers."""
        if not self._has_stepped:
            for current in self.all():
                current.adopt()

    def owners(self, parameters: Iterable[Any]) -> list[MergeRound]:
        """Return the round of each of PARAMETERS, one in progress or the newest, each once."""
        left, owners = set(map(id, parameters)), []
        for current in sorted(self.all(), key=lambda current: current.merged > 0)[::-1]:
            if not left.isdisjoint(current.ids):
                owners.append(current)
                left -= current.ids
        return owners

    def on_forward(self, parameters: Sequence[Any]) -> bool:
        """Whether DataParallel must average PARAMETERS after this forward; see `must_sync`."""
        # In each forward: no call of ours for each parameter.
        own = set(map(id, parameters))
        for current in self.all():
            current.parallel |= own
            current.averaging |= own
        return self.must_sync(own)

    def must_sync(self, own: set[int]) -> bool:
        """Whether this backward must average the gradients of parameters with the ids OWN.

        Not if a later step of the round will use all of them. A parameter without a known optimizer
        may be used at any time. Averaging once too often does no harm.
        """
        self._adopt_settings()
        rounds = self.all()
        if any(current.is_last and not own.isdisjoint(current.ids) for current in rounds):
            return True
        return bool(own.difference(*(current.ids for current in rounds)))

    def step(self, current: MergeRound, update: Callable[[], Any]) -> Any:
        """Merge the gradients of CURRENT, or call UPDATE if its round is complete.

        Raises RuntimeError if the gradients cannot be merged.
        """
        import paddle

        if current.is_updating:
            return update()
        unfinished = [other for other in self.all() if other.merged and other is not current]
        if not all(other.ids.isdisjoint(current.ids) for other in unfinished):
            refuse(SHARED)
        self._adopt_settings()
        self._has_stepped = True
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
        for other in self.all():
            other.forget_weights()
        return result

    def begin(self) -> None:
        """Prepare the gradients for a backward."""
        self._adopt_settings()
        if self._may_replace:
            # Paddle's optimizers are in cycles. The partial round of one that is gone is dropped.
            self._may_replace = False
            gc.collect()
        # Several optimizers may have the same parameters: all look before one writes.
        self._call(MergeRound.check_left)
        self._call(MergeRound.begin)

    def finish(self) -> None:
        """Remember the gradients of a backward."""
        self._call(MergeRound.average)
        self._call(MergeRound.finish)

    # A backward that has raised is over, too.
    abandon = finish

    def _call(self, method: Callable[[MergeRound], None]) -> None:
        import paddle

        with paddle.no_grad():
            for current in self.all():
                if not current.is_updating:
                    method(current)

    @border.watching("the count of merged micro-steps")
    def _report(self, current: MergeRound) -> None:
        self._proof.graph = "dygraph"
        steps = self._proof.counts["merged_steps"] = current.merged + 1
        why_not = "one micro-step makes an update" if steps == 1 else ""
        self._set(why_not, f"{plural(steps, 'micro-step')} made one update")

    def _set(self, reason: str, evidence: str = "") -> None:
        status = NO_EFFECT if reason else EFFECTIVE
        for name in _FIELDS:
            if self._spec.get(name) is None:
                continue
            if settings.script_wins(name):
                status, reason = SCRIPT, "the script sets it itself"
            value = None if status == NO_EFFECT else settings.effective(name)
            self._proof.field(name, status, in_effect=value, reason=reason, evidence=evidence)

    @border.watching("the count of merged micro-steps")
    def report_end(self) -> None:
        """Note the micro-steps that were dropped in partial rounds."""
        import paddle

        is_known = self._has_stepped or updates.count() or self._proof.status(_FIELDS[0])
        # Where programs cannot be read, Paddle may merge in them.
        if paddle.in_dynamic_mode() and not is_known:
            self._set("no optimizer of Paddle's has stepped")
        self._proof.note_dropped(max((current.merged for current in self.all()), default=0))
        self._proof.write()
