"""Compares averaged gradients with those that the ranks sent.

If all ranks average wrongly in the same way they stay equal, and `rank_check` sees nothing. So each
bucket is projected on random signs, in fp64, before and after its allreduce: the sum of the ranks'
projections equals the projection of the sum, within rounding. This is done in the first backwards
of a model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .. import border
from ..check_schedule import NEVER

if TYPE_CHECKING:
    from ..evidence import Evidence

# The backwards that are checked. From the second on, buckets are sent during the backward.
_CHECKED = 2
# Elements that are projected at a time, with the same signs in each block.
_BLOCK = 1 << 20
# The rounding error allowed in a projection, in standard deviations; no training reaches it.
_DEVIATIONS = 32.0
# Units in the last place at 1, and the smallest number that is kept. Paddle 2 and 3 name dtypes
# differently.
_EPSILON = {
    **dict.fromkeys(("float64", "fp64"), 2.0**-52),
    **dict.fromkeys(("float32", "fp32"), 2.0**-23),
    **dict.fromkeys(("float16", "fp16"), 2.0**-10),
    **dict.fromkeys(("bfloat16", "bf16"), 2.0**-7),
}
_SMALLEST: dict[str, float] = {"float16": 2.0**-24, "fp16": 2.0**-24}
_watching = border.watching("the check of averaged gradients")
# By place.
_known_signs: dict[str, Any] = {}


class GradientCheck:
    """Checks the buckets of one model, whose gradients NRANKS ranks of GROUP average.

    EVERY is the setting `check_ranks`.
    """

    def __init__(self, group: Any, nranks: int, every: int | str, proof: Evidence) -> None:
        self._group = group
        self._nranks = nranks
        self._left = 0 if every == NEVER else _CHECKED
        self._proof = proof
        # For each bucket: projection and sum of squares, before and after; and its rounding.
        self._before: list[Any] = []
        self._after: list[Any] = []
        self._rounding: list[tuple[float, float]] = []
        # The buckets that were sent. Each rank sends as many.
        self._sent = 0

    def begin(self) -> None:
        """Prepare for a backward."""
        self._before, self._after, self._rounding = [], [], []
        self._sent = 0

    def sent(self, flat: Any, dtype: str) -> None:
        """Project the bucket FLAT, this rank's share of an average that is summed as DTYPE."""
        if self._left:
            self._sent += 1
            self._project_sent(flat, dtype)

    @_watching
    def _project_sent(self, flat: Any, dtype: str) -> None:
        self._before += _projection(flat)
        name = dtype.rpartition(".")[2].lower()
        smallest = _SMALLEST.get(name, 0.0) * math.sqrt(flat.size)
        self._rounding.append((_EPSILON[name], smallest))

    @_watching
    def received(self, flat: Any) -> None:
        """Project the bucket FLAT, which holds the average; in the order of `sent`."""
        if self._left:
            self._after += _projection(flat)

    @_watching
    def finish(self) -> None:
        """Compare the projections; every rank of the model must call this.

        Raises Disproved if an average is not that of the ranks' gradients.
        """
        import paddle
        from paddle.base.core import ReduceOp

        if not self._sent:
            return
        self._left -= 1
        end = 2 * self._sent
        # A rank that compared alone would wait for the others forever.
        has_failed = not len(self._before) == len(self._after) == 2 * len(self._rounding) == end
        with paddle.no_grad():
            own = [float(has_failed)]
            sums = paddle.to_tensor([0.0] * end * has_failed + own, dtype="float64")
            if not has_failed:
                sums = paddle.concat([paddle.stack(self._before), sums])
            self._group.all_reduce(sums, ReduceOp.SUM, True).wait()
            *expected, failed = sums.numpy().tolist()
        if failed:
            self._left = 0
            self._proof.note("averaged gradients are no longer checked: a rank could not")
            return
        self._compare(expected)

    @_watching
    def _compare(self, expected: list[float]) -> None:
        import paddle

        averaged = paddle.stack(self._after).numpy().tolist()
        for number, (epsilon, smallest) in enumerate(self._rounding):
            projection, squares = expected[2 * number : 2 * number + 2]
            allowed = self._nranks * _DEVIATIONS * (epsilon * math.sqrt(squares) + smallest)
            if not agree(projection, averaged[2 * number], allowed * math.sqrt(self._nranks)):
                self._fail(number, projection, averaged[2 * number])
        counts = self._proof.counts
        counts["gradients_checked"] = counts.get("gradients_checked", 0) + 1

    def _fail(self, number: int, expected: float, actual: float) -> None:
        text = (
            f"the allreduce of bucket {number} did not return the average of the ranks' gradients:"
            f" a random projection of it is {actual:.9g}, not {expected:.9g}"
        )
        self._proof.note(f"{text}.")
        self._proof.claim()
        self._proof.write()
        raise border.Disproved(f"fleetrun: {text}. --check_ranks=-1 disables this check.")


def agree(expected: float, actual: float, allowed: float) -> bool:
    """Whether ACTUAL is EXPECTED within ALLOWED, or neither is finite.

    >>> agree(1.0, 1.1, 0.2), agree(float("nan"), float("inf"), 0.0), agree(1.0, float("inf"), 1e9)
    (True, True, False)
    """
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return math.isfinite(expected) == math.isfinite(actual)
    return abs(expected - actual) <= allowed


def _projection(flat: Any) -> list[Any]:
    """Return the sum of FLAT's elements with random signs and the sum of their squares, in fp64."""
    import paddle

    with paddle.no_grad():
        signs = _signs(flat.place)
        elements = flat.flatten()
        totals = []
        for start in range(0, elements.shape[0], _BLOCK):
            block = elements[start : start + _BLOCK].astype("float64")
            totals.append(
                paddle.stack([(block * signs[: block.shape[0]]).sum(), (block * block).sum()])
            )
        total = totals[0] if len(totals) == 1 else paddle.stack(totals).sum(0)
        return [total[0], total[1]]


def _signs(place: Any) -> Any:
    """Return `_BLOCK` signs at PLACE, 1 or -1 in fp64; the same on all ranks."""
    import numpy as np
    import paddle

    if str(place) not in _known_signs:
        signs = np.random.RandomState(0).randint(0, 2, _BLOCK) * 2.0 - 1.0
        _known_signs[str(place)] = paddle.to_tensor(signs, place=place)
    return _known_signs[str(place)]
