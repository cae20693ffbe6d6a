"""Sends the gradients of a bucket as 16-bit floats: they are cast, summed, and cast back.

Paddle's own `fp16_allreduce` sends nothing at all, and ranks diverge. Ours is for dynamic graphs,
after a self-test: gloo of Paddle 3.3.1 sums float16 to infinity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import border, settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..allreduce_stages import Work
    from ..communicators import Communicator

# The dtype of each field; the first enabled field counts. bfloat16 has the range of float32,
# float16 has more digits.
DTYPES = {"bf16_allreduce": "bfloat16", "fp16_allreduce": "float16"}
# Values of the self-test for each rank: eighths, which both dtypes hold.
_EIGHTHS = 7


class CompressedWork:
    """The sum of a bucket as 16-bit floats, which `wait` casts back into the bucket."""

    def __init__(self, compression: Compression, flat: Any, half: Any) -> None:
        self._compression = compression
        self._flat = flat
        self._half = half
        # The pending works, and the same sum in 32 bits if the loss is measured.
        self.works: list[Work] = []
        self.exact: Any = None

    def wait(self) -> None:
        """Wait for the sum and copy it into the gradients."""
        import paddle

        for work in self.works:
            work.wait()
        self.works = []
        with paddle.no_grad():
            # The gradients are views of this memory.
            self._flat.copy_(self._half.cast(self._flat.dtype), False)
            if self.exact is not None:
                self._compression.measure(self._flat, self.exact)
                self.exact = None


class Compression:
    """How the buckets of a model are compressed.

    `failure` says why they are sent in 32 bits nevertheless. `error` is the largest deviation in
    the first backward relative to the largest gradient: NaN if only one of the sums has an
    infinity, None if it was not measured.
    """

    def __init__(self, field: str, failure: str = "") -> None:
        self.field = field
        self.dtype = DTYPES[field]
        self.failure = failure
        self.error: float | None = None
        self._gap = self._largest = 0.0

    def all_reduce(
        self, communicator: Communicator, flat: Any, *, is_only: bool, measures: bool
    ) -> CompressedWork | None:
        """Begin to sum FLAT over the ranks; with MEASURES also in 32 bits, to compare."""
        import paddle

        with paddle.no_grad():
            half = flat.cast(self.dtype)
            exact = flat.clone() if measures else None
        sent = CompressedWork(self, flat, half)
        sent.works = [
            work
            for work in (
                communicator.all_reduce(half, is_only=is_only),
                communicator.all_reduce(exact) if measures else None,
            )
            if work is not None
        ]
        if measures:
            # The exact sum is for the report only.
            communicator.calls -= 1
            sent.exact = exact
        if sent.works:
            return sent
        sent.wait()
        return None

    def compresses(self, flat: Any) -> bool:
        """Whether the bucket FLAT is cast: not if it already has 16 bits."""
        import paddle

        return not self.failure and bool(flat.dtype == paddle.float32)

    @border.watching("the measurement of what 16 bits lose")
    def measure(self, flat: Any, exact: Any) -> None:
        """Update `error` with the difference between FLAT and EXACT."""
        self._gap = max(self._gap, float((flat - exact).abs().max()), key=_worst)
        self._largest = max(self._largest, float(exact.abs().max()), key=_worst)
        self.error = self._gap / self._largest if self._largest else 0.0


def _worst(number: float) -> float:
    """Order numbers so that NaN is the largest.

    >>> max(1.0, float("nan"), 2.0, key=_worst)
    nan
    """
    return number if number == number else float("inf")  # noqa: PLR0124


def choose(communicator: Communicator, ranks: Sequence[int], own: int) -> Compression | None:
    """Return the requested compression after a self-test on all RANKS; this rank is OWN."""
    field = next((name for name in DTYPES if settings.effective(name)), None)
    if field is None:
        return None
    dtype: Any = DTYPES[field]
    is_right = _sums_right(dtype, communicator, len(ranks), ranks.index(own))
    # All or none: ranks that send different sizes hang.
    if communicator.sum_integers([is_right])[0] == len(ranks):
        return Compression(field)
    return Compression(field, f"this Paddle's communication sums {dtype} wrongly: self-tested")


def _sums_right(dtype: Any, communicator: Communicator, nranks: int, place: int) -> bool:
    """Whether COMMUNICATOR sums DTYPE right; one rank contributes each number: sums are exact."""
    import paddle

    expected = [(number % _EIGHTHS + 1) / 8 for number in range(nranks * _EIGHTHS)]
    own = [value if index % nranks == place else 0.0 for index, value in enumerate(expected)]
    with paddle.no_grad():
        tensor = paddle.to_tensor(own, dtype="float32", place=communicator.place).cast(dtype)
        try:
            work = communicator.all_reduce(tensor)
            communicator.calls -= 1
            if work is not None:
                work.wait()
        except Exception:
            # A backend without this dtype raises before it sends anything.
            return False
        return bool(tensor.cast("float32").numpy().tolist() == expected)
