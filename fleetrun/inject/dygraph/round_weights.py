"""Detects a script that writes weights while gradients of other weights are being merged.

Writes by an optimizer's own update do not count. A script may write the same values: an EMA of the
weights that is swapped in for a while, or clipping that changes nothing. So the weights are
compared with a copy, which is made only if a script writes weights at all.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .. import parameter_history
from ..paddle_api import tensors

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

# The first rounds, whose weights are always copied.
_FIRST_ROUNDS = 2
# Rounding relative to the largest weight, as normalising twice causes.
_ROUNDING = 1e-6


class RoundWeights:
    """The weights of one optimizer, as they were when a round of merged gradients began."""

    def __init__(self) -> None:
        self._rounds = 0
        # A script has written weights within a round.
        self._are_written = False
        self._parameters: list[Any] = []
        # The ids of tensors written by methods that leave no other trace.
        self._recorded: set[int] = set()
        parameter_history.record_writes(self._recorded)
        weakref.finalize(self, parameter_history.end_record, self._recorded).atexit = False
        self._states: list[tuple[int, int]] = []
        self._copies: list[Any] = []

    def begin(self, parameters: Sequence[Any]) -> None:
        """Remember PARAMETERS, whose gradients the round merges."""
        self._parameters = list(parameters)
        self._recorded.clear()
        self._states = tensors.states(self._parameters)
        self._copies = []
        if self._are_written or self._rounds < _FIRST_ROUNDS:
            self._copies = [parameter.detach().clone() for parameter in self._parameters]

    def end(self) -> None:
        """Forget the weights: the round has ended, or another optimizer has updated them."""
        self._rounds += bool(self._parameters)
        self._parameters, self._states, self._copies = [], [], []
        self._recorded.clear()

    @property
    def is_first_round(self) -> bool:
        """Whether no round has ended yet."""
        return not self._rounds

    @property
    def is_known(self) -> bool:
        """Whether there are weights to compare with."""
        return bool(self._parameters)

    def are_written(self, trained: Container[int]) -> bool:
        """Whether any weight of TRAINED (ids) was written since the last look."""
        return any(self._written(trained))

    def are_changed(self, trained: Container[int]) -> bool:
        """Whether any weight of TRAINED (ids) has changed since the round began.

        False if the script has never written weights before, as there is no copy.
        """
        written = self._written(trained)
        if not any(written):
            return False
        self._are_written = True
        self._recorded.clear()
        self._states = tensors.states(self._parameters)
        return any(
            is_written and _differ(before, now)
            for before, now, is_written in zip(self._copies, self._parameters, written)
        )

    def _written(self, trained: Container[int]) -> list[bool]:
        now = tensors.states(self._parameters)
        if now == self._states and not self._recorded:
            return []
        # Values that the forward writes, such as running statistics, have no gradient.
        return [
            (before != after or id(parameter) in self._recorded) and id(parameter) in trained
            for parameter, before, after in zip(self._parameters, self._states, now)
        ]


def _differ(before: Any, now: Any) -> bool:
    """Whether NOW differs from BEFORE by more than rounding."""
    import paddle

    if before.shape != now.shape or before.dtype != now.dtype:
        return True
    with paddle.no_grad():
        old, new = before.astype("float32"), now.detach().astype("float32")
        return not bool((old - new).abs().max() <= _ROUNDING * old.abs().max())
