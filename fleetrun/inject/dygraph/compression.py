"""Sends the gradients of a bucket as 16-bit floats: they are cast, summed, and cast back.

Paddle's own `fp16_allreduce` sends nothing at all, and ranks diverge. Ours is for dynamic graphs,
after a self-test: gloo of Paddle 3.3.1 sums float16 to infinity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..communicators import Communicator

# The dtype of each field; the first enabled field counts. bfloat16 has the range of float32,
# float16 has more digits.
DTYPES = {"bf16_allreduce": "bfloat16", "fp16_allreduce": "float16"}
# Values of the self-test for each rank: eighths, which both dtypes hold.
_EIGHTHS = 7


def asked() -> str:
    """Return the field that is in effect, or nothing."""
    return next((name for name in DTYPES if settings.effective(name)), "")


class Compression(NamedTuple):
    """How the buckets of a model are compressed; FAILURE says why they are not, nevertheless."""

    field: str
    failure: str = ""

    @property
    def dtype(self) -> Any:
        """The dtype in which buckets are sent."""
        return DTYPES[self.field]

    def compresses(self, flat: Any) -> bool:
        """Whether the bucket FLAT is cast: not if it already has 16 bits."""
        import paddle

        return not self.failure and bool(flat.dtype == paddle.float32)

    def has_sent(self, flat: Any) -> bool:
        """Whether FLAT has the dtype in which buckets are sent."""
        import paddle

        return bool(flat.dtype == getattr(paddle, self.dtype))


def choose(
    communicator: Communicator, ranks: Sequence[int], own: int, place: Any
) -> Compression | None:
    """Return the requested compression after a self-test on all RANKS; this rank is OWN."""
    field = asked()
    if not field:
        return None
    is_right = _sums_right(DTYPES[field], communicator, len(ranks), ranks.index(own), place)
    # All or none: ranks that send different sizes hang.
    if communicator.sum_integers([is_right], place)[0] == len(ranks):
        return Compression(field)
    return Compression(
        field, f"this Paddle's communication sums {DTYPES[field]} wrongly: self-tested"
    )


def _sums_right(
    dtype: Any, communicator: Communicator, nranks: int, number: int, place: Any
) -> bool:
    """Whether COMMUNICATOR sums DTYPE right; one rank contributes each value: sums are exact."""
    import paddle

    expected = [(index % _EIGHTHS + 1) / 8 for index in range(nranks * _EIGHTHS)]
    own = [value if index % nranks == number else 0.0 for index, value in enumerate(expected)]
    with paddle.no_grad():
        tensor = paddle.to_tensor(own, dtype="float32", place=place).cast(dtype)
        try:
            communicator.all_reduce(tensor, overlaps=False)
        except Exception:
            # A backend without this dtype raises before it sends anything.
            return False
        finally:
            communicator.calls -= 1
        return bool(tensor.cast("float32").numpy().tolist() == expected)
