"""Tells whether a script writes weights while gradients of other weights are being merged.

What an optimizer's own update writes is not the script's. A script may write what was there before:
an EMA of the weights that is swapped in for a while, or clipping that had been done already. So a
copy tells whether the weights are others, but it is only made where a script writes them at all.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .. import parameter_history

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

# The rounds of which there are copies in any case.
_FIRST_ROUNDS = 2
# The change that is rounding, as a part of the largest weight: of what is normed once more.
_ROUNDING = 1e-6


class RoundWeights:
    """The weights of one optimizer, as they were when a round of merged gradients began."""

    def __init__(self) -> None:
        self._rounds = 0
        # A script has written weights within a round.
        self._are_written = False
        self._parameters: list[Any] = []
        # What was written by methods that leave no other trace.
        self._recorded: set[int] = set()
        parameter_history.record_writes(self._recorded)
        weakref.finalize(self, parameter_history.end_record, self._recorded).atexit = False
        # In-place version and address of each, as they were last.
        self._states: list[tuple[int, int]] = []
        self._copies: list[Any] = []

    def begin(self, parameters: Sequence[Any]) -> None:
        """Remember PARAMETERS: the gradients of the round are theirs."""
        self._parameters = list(parameters)
        self._recorded.clear()
        self._states = _states(self._parameters)
        self._copies = []
        if self._are_written or self._rounds < _FIRST_ROUNDS:
            self._copies = [each.detach().clone() for each in self._parameters]

    def end(self) -> None:
        """Forget them: the round has ended, or another optimizer has updated them."""
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
        """Whether any weight of TRAINED (ids) was written since they were looked at last."""
        return any(self._written(trained))

    def are_changed(self, trained: Container[int]) -> bool:
        """Whether any weight of TRAINED (ids) is another one than when the round began.

        False where the script has never written weights before, and so nothing is known.
        """
        written = self._written(trained)
        if not any(written):
            return False
        self._are_written = True
        self._recorded.clear()
        self._states = _states(self._parameters)
        return any(
            is_written and _differ(before, now)
            for before, now, is_written in zip(self._copies, self._parameters, written)
        )

    def _written(self, trained: Container[int]) -> list[bool]:
        now = _states(self._parameters)
        if now == self._states and not self._recorded:
            return []
        # What forward writes into, as running statistics, has no gradient.
        return [
            (before != after or id(parameter) in self._recorded) and id(parameter) in trained
            for parameter, before, after in zip(self._parameters, self._states, now)
        ]


def _differ(before: Any, now: Any) -> bool:
    """Whether NOW is another matrix than BEFORE, by more than rounding."""
    import paddle

    if before.shape != now.shape or before.dtype != now.dtype:
        return True
    with paddle.no_grad():
        old, new = before.astype("float32"), now.detach().astype("float32")
        return not bool((old - new).abs().max() <= _ROUNDING * old.abs().max())


def _states(parameters: Sequence[Any]) -> list[tuple[int, int]]:
    return [(each.inplace_version, each.data_ptr()) for each in parameters]
