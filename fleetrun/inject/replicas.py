"""The ranks that hold copies of the same parameters, and how far the copies differ."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from . import store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The bits of a parameter's kind: ranks of a model-parallel group hold different parts of it; ranks
# split its values between updates.
DISTRIBUTED, SLICED = 1, 2
# The most blocks of a parameter that are compared where checksums differ; with so many rows, blocks
# are of rows.
_BLOCKS = 4096
_MANY_ROWS = 512
# By the ranks: how often these have exchanged something.
_exchanges: Counter[tuple[int, ...]] = Counter()


class Part(NamedTuple):
    """A parameter as this rank holds it, and its kind."""

    parameter: Any
    kind: int = 0

    @property
    def value(self) -> Any:
        """The values that this rank holds; of a parameter on a process mesh its part."""
        if hasattr(self.parameter, "_local_value") and self.parameter.is_dist():
            return self.parameter._local_value()
        return self.parameter.fw_storage if self.kind & SLICED else self.parameter


def world_size() -> int:
    """Return the number of ranks of the job, 1 if unknown (yet)."""
    text = os.environ.get("PADDLE_TRAINERS_NUM", "")
    return int(text) if text.isdigit() else 1


def reference(sums: Mapping[int, int]) -> int:
    """Return the first rank with the most frequent checksum; SUMS are by rank.

    >>> reference({0: 7, 1: 8, 2: 8}), reference({0: 7, 1: 8})
    (1, 0)
    """
    ((most, _),) = Counter(sums.values()).most_common(1)
    return next(rank for rank, value in sums.items() if value == most)


class ComparedRanks:
    """RANKS (None: all of the job) that hold copies of the same parameters.

    They exchange values through the job's TCP store, all together and in the same order.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._rank = int(os.environ["PADDLE_TRAINER_ID"])
        self.ranks = tuple(range(world_size()) if ranks is None else map(int, ranks))

    def _key(self) -> str:
        """Return a new key, the same on all of the ranks."""
        _exchanges[self.ranks] += 1
        digest = zlib.crc32(json.dumps(self.ranks).encode())
        name = f"{self.ranks[0]}/{len(self.ranks)}/{digest}"
        return f"fleetrun/check/{name}/{_exchanges[self.ranks]}"

    def gather(self, numbers: list[Any]) -> list[list[Any]]:
        """Return the NUMBERS of every rank, in the order of `ranks`."""
        return store.all_gather(self._key(), numbers, self._rank, self.ranks)

    def apart(self, sums: Mapping[int, int], array: Any, ulps: float) -> int:
        """Return how many blocks of ARRAY differ from those of the others by more than rounding.

        ARRAY is this rank's copy, SUMS are the checksums of the copies by rank, ULPS is the
        rounding of an element in units in the last place of the largest. The store keeps what it
        gets, so sums of blocks are compared.
        """
        import numpy as np

        key, shared, blocks = self._key(), store.job_store(), _blocks(array)
        if self._rank == reference(sums):
            shared.set(key, blocks.tobytes())
        others = np.frombuffer(bytes(shared.get(key)), dtype=blocks.dtype)
        # bfloat16 is uint16 in numpy.
        unit = float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 2.0**-8
        return _apart(blocks, others, ulps * unit, _block_size(array.shape))


def _block_size(shape: Sequence[int]) -> int:
    """Return the number of elements in each block of an array: whole rows, if there are many.

    >>> [_block_size(shape) for shape in ((1000, 8), (1_000_000, 8), (2, 100_000), (9,))]
    [8, 1960, 49, 1]
    """
    rows = shape[0] if len(shape) > 1 and shape[0] >= _MANY_ROWS else math.prod(shape)
    return math.prod(shape) // rows * -(-rows // _BLOCKS)


def _blocks(array: Any) -> Any:
    """Return the largest absolute value of ARRAY, and the sum of each block, in fp64.

    Summed with random signs, so that what rounding has added cancels out.
    """
    import numpy as np

    values = as_float32(array).astype("float64").reshape(-1)
    largest = np.max(np.abs(values), where=np.isfinite(values), initial=0.0)
    signs = np.arange(values.size) * 40503 % 65521 % 2 * 2 - 1
    starts = np.arange(0, values.size, _block_size(array.shape))
    return np.concatenate([[largest], np.add.reduceat(values * signs, starts)])


def _apart(own: Any, first: Any, rounding: float, block: int) -> int:
    """Return how many blocks of OWN differ from FIRST by more than rounding; see `_blocks`.

    ROUNDING is that of one of the elements, of which a BLOCK has so many, relative to the largest.

    >>> import numpy as np
    >>> first = np.array([1.0, np.nan, np.inf, 0.0], "float32")
    >>> def apart(own):
    ...     return _apart(_blocks(own), _blocks(first), 1e-6, 1)
    >>> apart(first + np.float32(1e-7)), apart(first[::-1])
    (0, 4)
    """
    import numpy as np

    allowed = rounding * first[0] * min(block, 4 * math.sqrt(block))
    is_near = np.isclose(own[1:], first[1:], rtol=0.0, atol=allowed, equal_nan=True)
    return int(np.count_nonzero(~is_near))


def as_float32(array: Any) -> Any:
    """Return ARRAY in float32 if it is bfloat16, which Paddle gives as uint16, the upper half."""
    is_bfloat16 = array.dtype == "uint16"
    return (array.astype("uint32") << 16).view("float32") if is_bfloat16 else array
