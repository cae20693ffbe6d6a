"""Tells what updates a parameter: gradients train it, and forward keeps running statistics in it.

Running statistics are parameters of a layer, too (BatchNorm's `_mean` and `_variance`, and what
people write themselves), and look trained where a script sets `stop_gradient = False` for a whole
layer. Their names tell nothing. But they have no gradient, or forward itself writes into them.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# These do not count as changes in place: they are heard of when they are called.
_WRITING = ("set_value", "copy_")
_OFTEN = 2
# The forwards that run now, each with the ids of the tensors that were given values in it.
_forwards: list[set[int]] = []


def watch_writes() -> None:
    """Hear of the tensors that are given values while a forward is watched."""
    from paddle.base import core

    kind: Any = core.eager.Tensor
    for name in _WRITING:
        if hasattr(kind, name):
            setattr(kind, name, _heard(getattr(kind, name)))


def _heard(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def writing(tensor: Any, *args: Any, **options: Any) -> Any:
        for written in _forwards:
            written.add(id(tensor))
        return write(tensor, *args, **options)

    return writing


class ParameterHistory:
    """What was seen to update the parameters of one model, which keep their ids while it lives."""

    def __init__(self, model: Any) -> None:
        # Not the model itself: this goes when it goes.
        self._parameters = list(model.parameters())
        self._learned: set[int] = set()
        # In how many of the forwards that were watched each was written into.
        self._written: Counter[int] = Counter()
        self._forwards = 0
        # After how many updates the ranks were compared last.
        self.updates = 0

    def see_gradients(self, parameters: Iterable[Any]) -> None:
        """Remember which of PARAMETERS have a gradient now."""
        for each in parameters:
            # Mixed precision may keep it beside the parameter.
            if id(each) not in self._learned and (
                each.grad is not None or getattr(each, "main_grad", None) is not None
            ):
                self._learned.add(id(each))

    @contextlib.contextmanager
    def watching_forward(self) -> Iterator[None]:
        """Remember which parameters are written into meanwhile."""
        before = [_state(each) for each in self._parameters]
        given: set[int] = set()
        _forwards.append(given)
        try:
            yield
        finally:
            _forwards.remove(given)
        self._forwards += 1
        for each, state in zip(self._parameters, before):
            if state != _state(each):
                given.add(id(each))
        self._written.update(given)

    def is_learned(self, parameter: Any) -> bool:
        """Whether PARAMETER ever had a gradient when its optimizer stepped."""
        return id(parameter) in self._learned

    def is_written(self, parameter: Any) -> bool:
        """Whether forwards write into PARAMETER, again and again.

        Once is how some layers begin: what they train then should be the same on all ranks.
        """
        return self._forwards > 0 and self._written[id(parameter)] >= min(self._forwards, _OFTEN)


def _state(parameter: Any) -> tuple[int, int]:
    """Tell where PARAMETER is, and how often it was changed in place."""
    return parameter.data_ptr(), parameter.inplace_version
