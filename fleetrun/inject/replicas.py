"""The ranks that hold copies of the same parameters, and whether the copies differ."""

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
KINDS = range(4)
# By axis of fleet's topology: the kinds that it splits. Other axes, such as `pipe`, split all.
_SPLITS = {
    "data": 0,
    "sep": 0,
    "sharding": SLICED,
    "moe_sharding": SLICED,
    "dense_sharding": SLICED,
    "model": DISTRIBUTED,
}
# The most blocks of a parameter that are compared where checksums differ; with so many rows, blocks
# are of rows.
_BLOCKS = 4096
_MANY_ROWS = 512
# By the ranks: how often these have gathered.
_gathers: Counter[tuple[int, ...]] = Counter()


class Part(NamedTuple):
    """A parameter as this rank holds it, and its kind."""

    parameter: Any
    kind: int = 0

    @property
    def value(self) -> Any:
        """The values that this rank holds."""
        if is_on_mesh(self.parameter):
            return self.parameter._local_value()
        return self.parameter.fw_storage if self.kind & SLICED else self.parameter


def is_on_mesh(parameter: Any) -> bool:
    """Whether PARAMETER is spread over a process mesh (auto parallel)."""
    return hasattr(parameter, "_local_value") and bool(parameter.is_dist())


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
    """RANKS (None: all of the job) that hold copies of the same parameters, or parts of them.

    PLACES has a value for each rank by the kind of parameters, equal for ranks with the same ones;
    None: all have the same. They exchange values through the job's TCP store, and all compare
    together, in the same order.
    """

    def __init__(
        self, ranks: Sequence[int] | None = None, places: Mapping[int, list[object]] | None = None
    ) -> None:
        self.rank = int(os.environ["PADDLE_TRAINER_ID"])
        self.ranks = list(range(world_size()) if ranks is None else ranks)
        self._places = places
        digest = zlib.crc32(json.dumps(self.ranks).encode())
        self._name = f"fleetrun/check/{self.ranks[0]}/{len(self.ranks)}/{digest}"

    @property
    def _key(self) -> str:
        return f"{self._name}/{_gathers[tuple(self.ranks)]}"

    def gather(self, numbers: list[Any]) -> list[list[Any]]:
        """Return the NUMBERS of every rank, in the order of `ranks`."""
        _gathers[tuple(self.ranks)] += 1
        rows: list[list[Any]] = store.all_gather(self._key, numbers, self.rank, self.ranks)
        return rows

    def places(self, kind: int) -> list[object]:
        """Return a value for each rank, equal for ranks that hold the same parameters of KIND."""
        return [None] * len(self.ranks) if self._places is None else self._places[kind]

    def apart(self, index: int, sums: Mapping[int, int], array: Any, ulps: float) -> int:
        """Return how many blocks of ARRAY differ from those of the others by more than rounding.

        ARRAY is this rank's copy, SUMS are the checksums of the copies by rank, ULPS is the
        rounding of an element in units in the last place of the largest. The store keeps what it
        gets, so sums of blocks are compared. All ranks with copies know the parameter by INDEX.
        """
        import numpy as np

        first = reference(sums)
        key = f"{self._key}/{index}/{first}"
        shared = store.job_store()
        blocks = _blocks(array)
        if self.rank == first:
            shared.set(key, blocks.tobytes())
        others = np.frombuffer(bytes(shared.get(key)), dtype=blocks.dtype)
        return _apart(blocks, others, ulps * _unit(array.dtype), _block_size(array.shape))


def hybrid_ranks(fleet_groups: Any) -> ComparedRanks:
    """Return all ranks of a job that fleet has set up, each of which holds a part of the model.

    Ranks with the same coordinates along the axes that split parameters hold the same ones.
    """
    axes = fleet_groups.topology()
    names = axes.get_hybrid_group_names()
    coordinates = [axes.get_coord(rank) for rank in range(world_size())]
    return ComparedRanks(
        places={
            kind: [
                tuple(
                    place
                    for name, place in zip(names, own)
                    if name not in _SPLITS or kind & _SPLITS[name]
                )
                for own in coordinates
            ]
            for kind in KINDS
        }
    )


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


def _unit(dtype: Any) -> float:
    """Return one unit in the last place at 1 of numpy's DTYPE; bfloat16 is uint16 there."""
    import numpy as np

    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-8


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
