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
from ..paddle_api import tensors

if TYPE_CHECKING:
    from ..evidence import Evidence

# The backwards that are checked. From the second on, buckets are sent during the backward.
_CHECKED = 2
# The parity of a place's multiple modulo a prime is its sign.
_STEP, _PRIME = 40503, 65521
# The rounding error allowed in a projection, in standard deviations; no training reaches it.
_DEVIATIONS = 32.0
# Units in the last place at 1, and the smallest number that is kept, by the first letters of a
# dtype's name and its bits.
_UNITS = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "b16": 2.0**-7}
_SMALLEST = {"f16": 2.0**-24}
_watching = border.watching("the check of averaged gradients")


class GradientCheck:
    """Checks the buckets of one model, whose gradients NRANKS ranks of GROUP average.

    EVERY is the setting `check_ranks`.
    """

    def __init__(self, group: Any, nranks: int, every: int | str, proof: Evidence) -> None:
        self._group = group
        self._nranks = nranks
        self._left = 0 if every == NEVER else _CHECKED
        self._proof = proof
        # The projection of each bucket before and after, and its dtype.
        self._before: list[Any] = []
        self._after: list[Any] = []
        self._dtypes: list[str] = []

    def begin(self) -> None:
        """Prepare for a backward."""
        self._before, self._after, self._dtypes = [], [], []

    def sent(self, flat: Any, dtype: str) -> None:
        """Project the bucket FLAT, this rank's share of an average that is summed as DTYPE."""
        if self._left:
            name = dtype.rpartition(".")[2].lower()
            self._dtypes.append(name[0] + name[-2:])
            self._before.append(_projection(flat))

    def received(self, flat: Any) -> None:
        """Project the bucket FLAT, which holds the average; in the order of `sent`."""
        if self._left:
            self._after.append(_projection(flat))

    @_watching
    def finish(self) -> None:
        """Compare the projections; every rank of the model must call this.

        Raises Disproved if an average is not that of the ranks' gradients.
        """
        import paddle
        from paddle.base.core import ReduceOp

        # Each rank sends as many.
        if not self._dtypes:
            return
        self._left -= 1
        # A rank that compared alone would wait for the others forever.
        has_failed = any(item is None for item in (*self._before, *self._after))
        with paddle.no_grad():
            zeros = paddle.zeros([3], "float64")
            rows = [zeros] * len(self._dtypes) if has_failed else self._before
            sums = paddle.stack([*rows, zeros + float(has_failed)])
            self._group.all_reduce(sums, ReduceOp.SUM, True).wait()
            *expected, (failed, *_) = sums.numpy().tolist()
        if failed:
            self._left = 0
            self._proof.note("averaged gradients are no longer checked: a rank could not")
            return
        for number, (total, squares, size) in enumerate(expected):
            dtype = self._dtypes[number]
            rounding = _UNITS[dtype] * math.sqrt(squares)
            rounding += _SMALLEST.get(dtype, 0.0) * math.sqrt(size / self._nranks)
            average = float(self._after[number].numpy()[0])
            if not agree(total, average, self._nranks**1.5 * _DEVIATIONS * rounding):
                self._disprove(
                    f"the allreduce of bucket {number} did not return the average of the ranks'"
                    f" gradients: a random projection of it is {average:.9g}, not {total:.9g}"
                )
        counts = self._proof.counts
        counts["gradients_checked"] = counts.get("gradients_checked", 0) + 1

    def _disprove(self, text: str) -> None:
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


@_watching
def _projection(flat: Any) -> Any:
    """Return the sum of FLAT's elements with random signs, that of their squares, and their number.

    In fp64; the shape is [3]. The signs are the same on all ranks.
    """
    import paddle

    with paddle.no_grad(), tensors.made_at(flat.place):
        elements = flat.flatten().astype("float64")
        sums = [(elements * _signs(elements.shape[0])).sum(), (elements * elements).sum()]
        return paddle.stack([*sums, paddle.full([], elements.shape[0], "float64")])


def _signs(size: int) -> Any:
    """Return SIZE signs, 1 or -1 in fp64."""
    import paddle

    places = paddle.arange(size, dtype="int64")
    return (places * _STEP % _PRIME % 2 * 2 - 1).astype("float64")
