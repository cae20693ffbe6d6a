"""Where runs of a training differ, by the snapshots and losses of their ranks; pure."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from fleetrun.rundir.rankfile import RankAxes

# By the type of a parameter, the distance of 1 to the next number.
_UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# The difference by rounding that one update may cause, in units in the last place; of losses, to
# which all parameters contribute, at once.
_ULPS_PER_UPDATE = 4
_FEWEST_ULPS = 32
# The multiple of the difference of two equal runs that still counts as noise: one pair is a small
# sample.
_NOISE = 4.0
# The bits of a parameter's kind, as in inject/replicas.py; below zero, no other rank has it.
_DISTRIBUTED, _SLICED = 1, 2
_SPLITS = {"dp": 0, "sep": 0, "sharding": _SLICED, "mp": _DISTRIBUTED}
_SPLITS |= {"moe_sharding": _SLICED, "dense_sharding": _SLICED}


class ValueKey(NamedTuple):
    """A value of a run: after which update, in which rank, its optimizer and place there."""

    update: int
    rank: int
    # Below zero: the loss of that update.
    optimizer: int = -1
    at: int = 0


class Value(NamedTuple):
    """A parameter in a snapshot, with the checksum of all its bits and some of its elements."""

    # Empty: a loss.
    name: str
    kind: int
    dtype: str
    size: int
    checksum: object
    # The largest element, whichever its sign.
    largest: float
    values: Sequence[float]


def loss(number: float) -> Value:
    """Return a loss as a value."""
    key = "nan" if math.isnan(number) else number
    return Value("", -1, "float32", 1, key, abs(number), array("d", [number]))


Values = Mapping[ValueKey, Value]


class Difference(NamedTuple):
    """A value that differs by APART, where ALLOWED is what rounding and noise come to."""

    key: ValueKey
    value: Value
    apart: float
    allowed: float = 0.0
    # The rank that it differs from, if both are of one run.
    other_rank: int | None = None


def fault(first: Values, other: Values) -> str:
    """Return why two runs cannot be compared; empty if they can."""
    own, theirs = ({key for key in run if key.optimizer >= 0} for run in (first, other))
    ranks = [{key.rank for key in keys} for keys in (own, theirs)]
    if ranks[0] != ranks[1]:
        return "not the same ranks have trained in both runs"
    for key in sorted(own ^ theirs):
        return f"rank {key.rank} has not made the same updates in both runs"
    for key in sorted(own):
        if first[key].size != other[key].size:
            return f"rank {key.rank} does not train parameters of the same sizes"
    return ""


def apart(first: Values, other: Values) -> dict[ValueKey, float]:
    """Return by how much the values in both runs differ; 0 if it is not known where."""
    return {
        key: _apart(value, other[key])
        for key, value in first.items()
        if key in other and other[key].checksum != value.checksum and other[key].size == value.size
    }


def allowed(first: Values, noise: Sequence[Mapping[ValueKey, float]]) -> dict[ValueKey, float]:
    """Return how much each value of FIRST may differ, by rounding and the NOISE of equal runs."""
    most: dict[tuple[int, ...], float] = defaultdict(float)
    until = {}
    for key in sorted(first):
        place = key[1:]
        most[place] = max(most[place], *(pair.get(key, 0.0) for pair in noise), 0.0)
        until[key] = most[place]
    # Some parameters are alike by chance, so that the median of all counts for each.
    typical = defaultdict(list)
    for key, noisy in until.items():
        if key.optimizer >= 0:
            typical[key.update].append(noisy)
    medians = {update: median_low(all_of) for update, all_of in typical.items()}
    limits = {}
    for key, value in first.items():
        ulps = _ULPS_PER_UPDATE * key.update
        noisy = until[key]
        if key.optimizer < 0:
            ulps = max(_FEWEST_ULPS, ulps)
        else:
            noisy = max(noisy, medians[key.update])
        limits[key] = max(ulps * _UNITS.get(value.dtype, 0.0) * value.largest, _NOISE * noisy)
    return limits


def beyond(
    first: Values,
    pairs: Iterable[Mapping[ValueKey, float]],
    noise: Sequence[Mapping[ValueKey, float]],
) -> list[Difference]:
    """Return what of the differences PAIRS to FIRST is more than rounding and NOISE, in order."""
    limits = allowed(first, noise)
    parted = [
        Difference(key, first[key], by, limits[key])
        for pair in pairs
        for key, by in pair.items()
        if not by <= limits[key]
    ]
    return sorted(parted, key=lambda difference: difference.key)


def ranks_apart(run: Values, axes: RankAxes | None) -> Difference | None:
    """Return the first difference of ranks that, by AXES, hold copies of one parameter."""
    held: dict[object, tuple[int, Value]] = {}
    for key in sorted(run):
        value = run[key]
        if key.optimizer < 0:
            continue
        owner = _owner(key.rank, value.kind, axes)
        copy = (key.update, key.optimizer, key.at, value.size, owner)
        rank, known = held.setdefault(copy, (key.rank, value))
        if rank != key.rank and known.checksum != value.checksum:
            by = _apart(known, value)
            rounding = _ULPS_PER_UPDATE * max(1, key.update) * _UNITS.get(value.dtype, 0.0)
            if not by <= rounding * known.largest:
                return Difference(key, known, by, rounding * known.largest, rank)
    return None


def _owner(rank: int, kind: int, axes: RankAxes | None) -> object:
    """Return a key that is the same for all ranks with a copy of RANK's parameter of KIND."""
    if kind < 0 or (axes is None and kind & _SLICED):
        return rank
    places = {} if axes is None else axes.places(rank)
    return tuple(
        (name, place)
        for name, place in places.items()
        if kind & _SPLITS.get(name, ~0) or name not in _SPLITS
    )


def _apart(first: Value, other: Value) -> float:
    """Return the largest known difference; 0 if only elements differ whose values are not known."""
    pairs = zip((first.largest, *first.values), (other.largest, *other.values), strict=True)
    return max(_distance(mine, yours) for mine, yours in pairs)


def _distance(first: float, other: float) -> float:
    """Return the distance of two numbers: 0 if both are NaN, infinite if one of them is.

    >>> _distance(1.0, 1.5), _distance(math.nan, math.nan), _distance(1.0, math.nan)
    (0.5, 0.0, inf)
    """
    if first == other or (math.isnan(first) and math.isnan(other)):
        return 0.0
    distance = abs(first - other)
    return math.inf if math.isnan(distance) else distance
