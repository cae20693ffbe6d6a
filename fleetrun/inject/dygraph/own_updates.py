"""Detects updates by optimizers that are not Paddle's: the weights differ at the next backward.

An optimizer of the script's own calls nothing of Paddle's that reveals an update. So until an
update of Paddle's is seen, the weights are inspected before each backward. Once they have changed
twice (the first change may be a loaded checkpoint), each change counts as an update.
"""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import border, parameter_history, updates
from ..import_hooks import after_import, watch_method
from ..paddle_api import tensors
from . import backward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..evidence import Evidence

# After this many changes of the weights, the script is known to update them.
_CHANGES = 2
# The most containers between an optimizer and its parameters.
_DEPTH = 4


class OwnOptimizer:
    """Represents the optimizer of a script that updates PARAMETERS itself."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameter_list = list(parameters)
        self._states = tensors.states(parameters)
        self.changes = 0

    def look(self, written: set[int]) -> bool:
        """Whether most parameters have changed since the last look, or are among those WRITTEN."""
        before, self._states = self._states, tensors.states(self._parameter_list)
        changed = sum(
            old != new or id(parameter) in written
            for parameter, old, new in zip(self._parameter_list, before, self._states)
        )
        # Forwards write some parameters, too, as quantisers write their scales.
        is_changed = 2 * changed > len(before)
        self.changes += is_changed
        return is_changed

    def made_by(self) -> str:
        """Return the class of the object with a `step` that holds the parameters, or nothing."""
        held: list[Any] = self._parameter_list[:1]
        visited = {id(self._parameter_list)}
        kinds: dict[str, None] = {}
        for _ in range(_DEPTH):
            visited.update(map(id, [held, *held]))
            referrers = [owner for owner in gc.get_referrers(*held) if id(owner) not in visited]
            visited.add(id(referrers))
            for owner in referrers:
                if callable(getattr(type(owner), "step", None)):
                    kinds[type(owner).__name__] = None
            held = [owner for owner in referrers if isinstance(owner, (list, tuple, dict, set))]
            if kinds or not held:
                break
        return ", ".join(kinds)


class OwnUpdates:
    """Inspects the weights at each backward until an optimizer of Paddle's has updated them."""

    def __init__(self, proof: Evidence) -> None:
        self._proof = proof
        # All parameters without a gradient so far, until an update is seen.
        self._made: list[weakref.ref[Any]] = []
        # One for the parameters of each model that have a gradient.
        self._optimizers: list[OwnOptimizer] = []
        # The ids of tensors written by methods that leave no other trace.
        self._written: set[int] = set()
        # The updates that were recorded here.
        self._own = 0
        # Whether an optimizer of Paddle's has stepped, though it has updated nothing yet.
        self.has_stepped: Callable[[], bool] = lambda: False
        # Until then, Paddle's own optimizers pay for it, too.
        self._end_kernels: Callable[[], None] = lambda: None

    def watch(self, framework: Any) -> None:
        """Record each new parameter, and inspect the weights at each backward."""
        backward.patch(sys.modules["paddle.base.core"])
        backward.listen(self)
        parameter_history.watch_writes()
        parameter_history.record_writes(self._written)
        after_import("paddle._C_ops", self._watch_kernels)
        watch_method(framework.EagerParamBase, "__init__", after=self._keep_made)
        atexit.register(border.watching("the count of updates")(self.end))

    def _keep_made(self, parameter: Any) -> None:
        if self._own == updates.count():
            self._made.append(weakref.ref(parameter))

    def _watch_kernels(self, operations: Any) -> None:
        self._end_kernels = parameter_history.watch_kernels(operations)

    def begin(self) -> None:
        """Record an update if the weights have changed since the last backward."""
        if self._own != updates.count() or updates.is_under_way() or self.has_stepped():
            self._made, self._optimizers = [], []
            parameter_history.end_record(self._written)
            self._end_kernels()
            backward.ignore(self)
            return
        changed = [optimizer for optimizer in self._optimizers if optimizer.look(self._written)]
        self._written.clear()
        for optimizer in changed:
            if optimizer.changes == _CHANGES:
                self._note(optimizer.made_by() or "the script")
        updated = [optimizer for optimizer in changed if optimizer.changes >= _CHANGES]
        if updated:
            self._own += 1
            updates.record(updated[0])

    @border.watching("the count of updates")
    def finish(self) -> None:
        """Find the trained parameters after a backward."""
        self._proof.backwards += 1
        alive = [param for reference in self._made if (param := reference()) is not None]
        pairs = list(zip(alive, tensors.gradients(alive)))
        trained = [parameter for parameter, gradient in pairs if gradient is not None]
        self._made = [weakref.ref(parameter) for parameter, gradient in pairs if gradient is None]
        if trained:
            self._optimizers.append(OwnOptimizer(trained))

    def abandon(self) -> None:
        """Do nothing for a backward that has raised."""

    def _note(self, updater: str) -> None:
        self._proof.note(
            f"{updater} updates the weights, and no optimizer of Paddle's has stepped: an update is"
            " counted when the weights differ at the next backward"
        )

    def end(self) -> None:
        """Name the optimizers whose updates were expected but not seen."""
        if not self._proof.updates:
            kinds = [optimizer.made_by() for optimizer in self._optimizers]
            self._proof.optimizer = ", ".join(dict.fromkeys(filter(None, kinds)))
