"""The ranks that hold copies of the same parameters, and where the copies differ.

`GroupRanks` and `HybridRanks` (dynamic graphs) exchange values by collectives, `StaticRanks`
(static graphs and process meshes) through the job's TCP store. All of `ranks` must compare
together.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from . import store, topology

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
# The axes with a group in fleet.
_LINES = ("data", "sharding", "sep", "model")


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


class GroupRanks:
    """The ranks of GROUP (None: of the job), which all hold copies of the same parameters."""

    def __init__(self, group: Any = None) -> None:
        import paddle

        self._paddle: Any = paddle
        self._group = group
        group_ranks = None if group is None else getattr(group, "ranks", None)
        self.rank = int(paddle.distributed.get_rank())
        self.ranks = (
            list(group_ranks) if group_ranks else list(range(paddle.distributed.get_world_size()))
        )

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the NUMBERS (int64) of every rank, in the order of `ranks`."""
        paddle = self._paddle
        with paddle.no_grad():
            own = paddle.to_tensor(numbers, dtype="int64")
            # With a gather to a list, Paddle frees the tensor that the device writes to too early.
            rows = paddle.empty([len(self.ranks) * len(numbers)], dtype="int64")
            paddle.distributed.stream.all_gather(rows, own, group=self._group)
            gathered: list[list[int]] = rows.numpy().reshape(len(self.ranks), -1).tolist()
            return gathered

    def places(self, _kind: int) -> list[object]:
        """Return a value for each rank, equal for ranks that hold the same parameters."""
        return [None] * len(self.ranks)

    def are_apart(self, _kind: int, sums: Mapping[int, int], array: Any, ulps: float) -> bool:
        """Whether ARRAY, this rank's copy, differs from others by more than rounding.

        SUMS are the checksums of the copies by rank, ULPS as in `_are_apart`.
        """
        paddle = self._paddle
        with paddle.no_grad():
            first = paddle.to_tensor(array)
            paddle.distributed.broadcast(first, src=reference(sums), group=self._group)
            return _are_apart(array, first.numpy(), ulps)


class HybridRanks(GroupRanks):
    """All ranks of a job that fleet has set up, each of which holds a part of the model.

    Ranks with the same coordinates along the axes that split parameters hold the same ones.
    """

    def __init__(self, fleet_groups: Any) -> None:
        super().__init__()
        axes = fleet_groups.topology()
        names = axes.get_hybrid_group_names()
        self._places: dict[int, list[object]] = {
            kind: [
                tuple(
                    place
                    for name, place in zip(names, axes.get_coord(rank))
                    if name not in _SPLITS or kind & _SPLITS[name]
                )
                for rank in self.ranks
            ]
            for kind in KINDS
        }
        # The groups along each axis, and the kinds that it splits.
        self._lines = [
            (GroupRanks(getattr(fleet_groups, f"get_{axis}_parallel_group")()), _SPLITS[axis])
            for axis in _LINES
            if topology.sizes().get(topology.AXES[axis], 1) > 1
        ]

    def places(self, kind: int) -> list[object]:
        """Return each rank's coordinates along the axes that split parameters of KIND."""
        return self._places[kind]

    def are_apart(self, kind: int, sums: Mapping[int, int], array: Any, ulps: float) -> bool:
        """Whether ARRAY differs from that of any neighbour, as in `GroupRanks`."""
        differs = False
        best = sums[reference(sums)]
        for line, split in self._lines:
            own = {rank: sums[rank] for rank in line.ranks} if not kind & split else {}
            if len({*own.values()}) > 1:
                # The most frequent values are right.
                first = next((rank for rank in own if own[rank] == best), line.ranks[0])
                differs |= line.are_apart(kind, {first: own[first]}, array, ulps)
        return differs


class StaticRanks:
    """RANKS (None: all) that run the same program, or hold the same parameters KEY."""

    # Several programs may be compared, each after its own first update: keys must be unique.
    _instances = 0

    def __init__(self, ranks: Sequence[int] | None = None, key: str = "") -> None:
        if not key:
            StaticRanks._instances += 1
            key = str(StaticRanks._instances)
        self._key = f"fleetrun/check/{key}"
        self._gathers = 0
        self._values = 0
        self.rank = int(os.environ["PADDLE_TRAINER_ID"])
        self.ranks = list(range(world_size()) if ranks is None else ranks)

    def gather(self, numbers: list[Any]) -> list[list[Any]]:
        """Return the NUMBERS of every rank, in the order of `ranks`."""
        self._gathers += 1
        key = f"{self._key}/{self._gathers}"
        rows: list[list[Any]] = store.all_gather(key, numbers, self.rank, self.ranks)
        return rows

    def places(self, _kind: int) -> list[object]:
        """Return a value for each rank, equal for ranks that hold the same parameters."""
        return [None] * len(self.ranks)

    def are_apart(self, _kind: int, sums: Mapping[int, int], array: Any, ulps: float) -> bool:
        """Whether ARRAY differs by more than rounding, as in `GroupRanks`."""
        import numpy as np

        self._values += 1
        key = f"{self._key}/values/{self._values}"
        shared = store.job_store()
        if self.rank == reference(sums):
            shared.set(key, array.tobytes())
        first = np.frombuffer(bytes(shared.get(key)), dtype=array.dtype).reshape(array.shape)
        return _are_apart(array, first, ulps)


def _are_apart(own: Any, first: Any, ulps: float) -> bool:
    """Whether OWN differs from FIRST by more than rounding.

    ULPS are the units in the last place of the largest value of FIRST that are rounding. OWN and
    FIRST are numpy arrays of one shape and dtype.

    >>> import numpy as np
    >>> first = np.array([1.0, np.nan, np.inf, 0.0], "float32")
    >>> _are_apart(first + np.float32(1e-6), first, 10), _are_apart(first[::-1], first, 10)
    (False, True)
    """
    import numpy as np

    if own.tobytes() == first.tobytes():
        return False
    unit = float(np.finfo(own.dtype).eps) if own.dtype.kind == "f" else 2.0**-8
    own, first = (as_float32(array).astype("float64") for array in (own, first))
    largest = float(np.max(np.abs(first), where=np.isfinite(first), initial=0.0))
    return not np.allclose(own, first, rtol=0.0, atol=ulps * unit * largest, equal_nan=True)


def as_float32(array: Any) -> Any:
    """Return ARRAY in float32 if it is bfloat16, which Paddle gives as uint16, the upper half."""
    is_bfloat16 = array.dtype == "uint16"
    return (array.astype("uint32") << 16).view("float32") if is_bfloat16 else array
