"""Sees updates that no optimizer of Paddle's makes, by weights that are others at a backward.

An optimizer that a script writes by itself calls nothing of Paddle's that tells of an update. So as
long as no other update is seen, the weights are looked at before each backward. Once they have
changed twice (the first time a checkpoint may have been loaded), each change counts as an update.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import border, parameter_history, updates
from ..paddle_api import tensors
from . import backward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..evidence import Evidence

# So often have weights changed where the script updates them.
_CHANGES = 2
# How many containers may be between an optimizer and its parameters.
_DEPTH = 4


class OwnOptimizer:
    """Stands for the optimizer of a script that updates PARAMETERS by itself."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameter_list = list(parameters)
        self._states = _states(parameters)
        # How often they have changed.
        self.changes = 0

    def look(self, written: set[int]) -> bool:
        """Whether most parameters have changed since the last look, or are among those WRITTEN."""
        before, self._states = self._states, _states(self._parameter_list)
        changed = sum(
            old != new or id(each) in written
            for each, old, new in zip(self._parameter_list, before, self._states)
        )
        # Forwards write some of them, too, as quantisers write their scales.
        is_changed = 2 * changed > len(before)
        self.changes += is_changed
        return is_changed

    def made_by(self) -> str:
        """Name the class of the object with a `step` that has the parameters; empty if none has."""
        found: list[Any] = self._parameter_list[:1]
        known = {id(self._parameter_list)}
        kinds: dict[str, None] = {}
        for _ in range(_DEPTH):
            known.update(map(id, [found, *found]))
            referrers = [each for each in gc.get_referrers(*found) if id(each) not in known]
            known.add(id(referrers))
            for each in referrers:
                if callable(getattr(type(each), "step", None)):
                    kinds[type(each).__name__] = None
            found = [each for each in referrers if isinstance(each, (list, tuple, dict, set))]
            if kinds or not found:
                break
        return ", ".join(kinds)


class OwnUpdates:
    """Looks at the weights at each backward until an optimizer of Paddle's has updated them."""

    def __init__(self, proof: Evidence) -> None:
        self._proof = proof
        # All parameters that were made and had no gradient yet, until an update is seen.
        self._made: list[weakref.ref[Any]] = []
        # Those of each model that have one.
        self._optimizers: list[OwnOptimizer] = []
        # The ids of what was written by methods that leave no other trace.
        self._written: set[int] = set()
        # The updates that were recorded here.
        self._own = 0
        # Whether an optimizer of Paddle's has stepped, though it has updated nothing yet.
        self.has_stepped: Callable[[], bool] = lambda: False
        # Is told who updates the weights; may raise.
        self.on_seen: Callable[[str], None] = self._note

    def watch(self, framework: Any) -> None:
        """Keep each parameter that is made, and look at each backward."""
        backward.patch(sys.modules["paddle.base.core"])
        backward.listen(self)
        parameter_history.watch_writes()
        parameter_history.record_writes(self._written)
        kind = framework.EagerParamBase
        init = kind.__init__

        @functools.wraps(init)
        def __init__(parameter: Any, *args: Any, **options: Any) -> None:
            init(parameter, *args, **options)
            if self._own == updates.count():
                self._made.append(weakref.ref(parameter))

        kind.__init__ = __init__
        # It lives as long as this process.
        atexit.register(border.watching("the count of updates")(self.end))

    def begin(self) -> None:
        """Look at the weights before a backward, and record an update if they are others."""
        if self._own != updates.count() or self.has_stepped():
            self._made, self._optimizers = [], []
            parameter_history.end_record(self._written)
            backward.ignore(self)
            return
        changed = [each for each in self._optimizers if each.look(self._written)]
        self._written.clear()
        for each in changed:
            if each.changes == _CHANGES:
                self.on_seen(each.made_by() or "the script")
        updated = [each for each in changed if each.changes >= _CHANGES]
        if updated:
            self._own += 1
            updates.record(updated[0])

    def finish(self) -> None:
        """Find the parameters that are trained, after a backward."""
        self._proof.backwards += 1
        alive = [each for each in (reference() for reference in self._made) if each is not None]
        has_gradient = [each is not None for each in tensors.gradients(alive)]
        trained = [each for each, has in zip(alive, has_gradient) if has]
        self._made = [weakref.ref(each) for each, has in zip(alive, has_gradient) if not has]
        if trained:
            self._optimizers.append(OwnOptimizer(trained))

    def abandon(self) -> None:
        """Do nothing for a backward that has raised."""

    def _note(self, who: str) -> None:
        self._proof.note(
            f"{who} updates the weights, and no optimizer of Paddle's has stepped: updates are seen"
            " by the weights that are others at the next backward"
        )

    def end(self) -> None:
        """Tell whose updates were not seen, if any were to be."""
        if not self._proof.updates:
            kinds = [each.made_by() for each in self._optimizers]
            self._proof.optimizer = ", ".join(dict.fromkeys(filter(None, kinds)))


def _states(parameters: Sequence[Any]) -> list[tuple[int, int]]:
    return [(each.inplace_version, each.data_ptr()) for each in parameters]
