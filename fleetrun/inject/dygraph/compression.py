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
DTYPES: dict[str, Any] = {"bf16_allreduce": "bfloat16", "fp16_allreduce": "float16"}
# Values of the self-test for each rank: eighths, which both dtypes hold.
_EIGHTHS = 7


def asked() -> str:
    """Return the field that is in effect, or nothing."""
    return next((name for name in DTYPES if settings.effective(name)), "")


class Compression(NamedTuple):
    """The field that compresses buckets in float32; FAILURE says why it does not, nevertheless."""

    field: str
    failure: str = ""

    @property
    def dtype(self) -> Any:
        """The dtype in which buckets are sent."""
        return "float32" if self.failure else DTYPES[self.field]


def choose(
    communicator: Communicator, ranks: Sequence[int], own: int, place: Any
) -> Compression | None:
    """Return the requested compression after a self-test on all RANKS; this rank is OWN."""
    import paddle

    field = asked()
    if not field:
        return None
    # One rank contributes each value, so sums are exact.
    expected = [(index % _EIGHTHS + 1) / 8 for index in range(len(ranks) * _EIGHTHS)]
    place_of_own = ranks.index(own)
    contributed = [
        value * (index % len(ranks) == place_of_own) for index, value in enumerate(expected)
    ]
    tensor = paddle.to_tensor(contributed, dtype="float32", place=place).cast(DTYPES[field])
    try:
        communicator.all_reduce(tensor, overlaps=False)
        is_right = tensor.cast("float32").numpy().tolist() == expected
    except Exception:
        # A backend without this dtype raises before it sends anything.
        is_right = False
    communicator.calls -= 1
    # All or none: ranks that send different sizes hang.
    if communicator.sum_integers([is_right], place)[0] == len(ranks):
        return Compression(field)
    return Compression(
        field, f"this Paddle's communication sums {DTYPES[field]} wrongly: self-tested"
    )
