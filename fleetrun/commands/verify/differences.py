"""Where runs of a training differ, by the snapshots of their ranks; pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

# By the type of a parameter, the distance of 1 to the next number.
_UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# The difference by rounding that one update may cause, in units in the last place.
_ULPS_PER_UPDATE = 4
# The multiple of the difference of two equal runs that still counts as noise: one pair is a small
# sample.
_NOISE = 4.0


class ValueKey(NamedTuple):
    """A parameter of a run: after which update, in which rank, its optimizer and place there."""

    update: int
    rank: int
    optimizer: int
    at: int = 0


class Value(NamedTuple):
    """A parameter in a snapshot, with the checksum of all its bits and some of its elements."""

    name: str
    dtype: str
    size: int
    checksum: object
    # The largest element, whichever its sign.
    largest: float
    values: Sequence[float]


Values = Mapping[ValueKey, Value]


class Difference(NamedTuple):
    """A value that differs by APART, where ALLOWED is what rounding and noise come to."""

    key: ValueKey
    value: Value
    apart: float
    allowed: float = 0.0


def fault(first: Values, other: Values) -> str:
    """Return why two runs cannot be compared; empty if they can."""
    if {key.rank for key in first} != {key.rank for key in other}:
        return "other ranks have trained"
    for key in sorted(first.keys() | other.keys()):
        if key not in first or key not in other:
            return f"rank {key.rank} has not made the same updates"
        if first[key].size != other[key].size:
            return f"rank {key.rank} trains parameters of other sizes"
    return ""


def apart(first: Values, other: Values) -> dict[ValueKey, float]:
    """Return by how much the values in both runs differ; 0 if it is not known where."""
    distances = {}
    for key, mine in first.items():
        yours = other.get(key)
        if yours is not None and yours.checksum != mine.checksum and yours.size == mine.size:
            pairs = zip((mine.largest, *mine.values), (yours.largest, *yours.values), strict=True)
            distances[key] = max(_distance(*pair) for pair in pairs)
    return distances


def beyond(
    first: Values,
    pairs: Iterable[Mapping[ValueKey, float]],
    noise: Sequence[Mapping[ValueKey, float]],
) -> tuple[Difference, ...]:
    """Return what of the differences PAIRS to FIRST is more than rounding and NOISE, in order."""
    # How much a value has differed in equal runs so far.
    most: dict[tuple[int, ...], float] = defaultdict(float)
    until, all_of = {}, defaultdict(list)
    for key in sorted(first):
        place = key[1:]
        most[place] = max(most[place], *(pair.get(key, 0.0) for pair in noise), 0.0)
        until[key] = most[place]
        all_of[key.update].append(most[place])
    # Some parameters are alike by chance, so that the median of all counts for each.
    typical = {update: median_low(noisy) for update, noisy in all_of.items()}
    differing = []
    for key, by in (item for pair in pairs for item in pair.items()):
        value = first[key]
        rounding = _ULPS_PER_UPDATE * key.update * _UNITS.get(value.dtype, 0.0) * value.largest
        allowed = max(rounding, _NOISE * max(until[key], typical[key.update]))
        if not by <= allowed:
            differing.append(Difference(key, value, by, allowed))
    return tuple(sorted(differing, key=lambda difference: difference.key))


def _distance(first: float, other: float) -> float:
    """Return the distance of two numbers: 0 if both are NaN, infinite if one of them is.

    >>> _distance(1.0, 1.5), _distance(math.nan, math.nan), _distance(1.0, math.nan)
    (0.5, 0.0, inf)
    """
    if first == other or (math.isnan(first) and math.isnan(other)):
        return 0.0
    distance = abs(first - other)
    return math.inf if math.isnan(distance) else distance
