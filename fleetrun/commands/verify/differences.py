"""Where two runs of a training begin to differ, by snapshots and losses of their ranks; pure."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fleetrun.records.rankfile import RankAxes

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


class Parameter(NamedTuple):
    """A parameter in a snapshot: the checksum of all its bits, and some or all of its elements."""

    name: str
    kind: int
    dtype: str
    size: int
    checksum: int
    # The largest element, whichever its sign.
    largest: float
    values: array[float]


class ParameterPlace(NamedTuple):
    """Where a parameter is: in which rank, in which optimizer's order, and its place there."""

    rank: int
    optimizer: int
    at: int


class RunSnapshots(NamedTuple):
    """What the ranks of a run recorded: parameters by optimizer and update, losses by update."""

    parameters: Mapping[int, Mapping[tuple[int, int], Sequence[Parameter]]]
    losses: Mapping[int, Mapping[int, float]]
    # Losses are those that the ranks printed, by their number.
    are_printed: bool = False

    def updates(self) -> list[int]:
        """Return the updates of which any rank has a snapshot."""
        return sorted({update for rank in self.parameters.values() for _, update in rank})


class Difference(NamedTuple):
    """The difference of a parameter after UPDATE, or, without a name, of the loss of RANK.

    IS_PRINTED: of the loss that it printed as the UPDATEth; when is not known.
    """

    update: int
    rank: int
    name: str
    apart: float
    # The largest of its numbers, and how far apart they may be.
    largest: float
    allowed: float = 0.0
    # The rank that RANK differs from, if both are of one run.
    other_rank: int | None = None
    is_printed: bool = False

    @property
    def share(self) -> float:
        """The difference as a share of the largest number."""
        return self.apart / self.largest if self.largest else math.inf


class RunDifferences(NamedTuple):
    """All differences of two runs, those of parameters and those of losses."""

    weights: Mapping[tuple[int, ParameterPlace], Difference]
    losses: Mapping[tuple[int, int], Difference]
    # Why they cannot be compared.
    fault: str = ""

    @property
    def are_equal(self) -> bool:
        """Whether both runs are the same to the last bit."""
        return not (self.weights or self.losses or self.fault)


class Noise(NamedTuple):
    """The differences of equal runs: parameters by place, losses by rank, each by update."""

    weights: Mapping[ParameterPlace, Sequence[tuple[int, float]]]
    losses: Mapping[int, Sequence[tuple[int, float]]]


def between(first: RunSnapshots, other: RunSnapshots) -> RunDifferences:
    """Return where OTHER differs from FIRST in any bit; what only one of them has is a fault."""
    weights = {}
    for rank, own in first.parameters.items():
        theirs = other.parameters.get(rank, {})
        if {*own} != {*theirs}:
            return RunDifferences({}, {}, f"rank {rank} has not made the same updates in both runs")
        for (optimizer, update), parameters in own.items():
            matching = theirs[optimizer, update]
            if [parameter.size for parameter in parameters] != [
                parameter.size for parameter in matching
            ]:
                return RunDifferences(
                    {}, {}, f"rank {rank} does not train parameters of the same sizes"
                )
            for index, (mine, yours) in enumerate(zip(parameters, matching, strict=True)):
                if mine.checksum != yours.checksum:
                    difference = Difference(
                        update, rank, mine.name, _apart(mine, yours), mine.largest
                    )
                    weights[update, ParameterPlace(rank, optimizer, index)] = difference
    if {*first.parameters} != {*other.parameters}:
        return RunDifferences({}, {}, "not the same ranks have trained in both runs")
    losses = {
        (update, rank): Difference(
            *(update, rank, "", _distance(loss, again), abs(loss)), is_printed=first.are_printed
        )
        for rank, own in first.losses.items()
        for update, loss in own.items()
        for again in [other.losses.get(rank, {}).get(update)]
        if again is not None and _distance(loss, again)
    }
    return RunDifferences(weights, losses)


def common(first: RunSnapshots, other: RunSnapshots) -> tuple[RunSnapshots, RunSnapshots]:
    """Return the snapshots of FIRST and of OTHER that exist in both."""
    keys = {
        rank: own.keys() & other.parameters.get(rank, {}).keys()
        for rank, own in first.parameters.items()
    }
    own_common, others_common = (
        RunSnapshots(
            {
                rank: {key: snapshots.parameters[rank][key] for key in sorted(both)}
                for rank, both in keys.items()
                if both
            },
            {},
        )
        for snapshots in (first, other)
    )
    return own_common, others_common


def noise(pairs: Iterable[RunDifferences]) -> Noise:
    """Return the largest differences of PAIRS of equal runs up to each update."""
    weights: dict[ParameterPlace, dict[int, float]] = defaultdict(dict)
    losses: dict[int, dict[int, float]] = defaultdict(dict)
    for pair in pairs:
        for (update, place), difference in pair.weights.items():
            weights[place][update] = max(difference.apart, weights[place].get(update, 0.0))
        for (update, rank), difference in pair.losses.items():
            losses[rank][update] = max(difference.apart, losses[rank].get(update, 0.0))
    return Noise(
        {place: _rising(by_update) for place, by_update in weights.items()},
        {rank: _rising(by_update) for rank, by_update in losses.items()},
    )


def _rising(by_update: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the largest value so far for each update.

    >>> _rising({2: 1.0, 1: 3.0, 5: 4.0})
    [(1, 3.0), (2, 3.0), (5, 4.0)]
    """
    most = 0.0
    rising = []
    for update in sorted(by_update):
        most = max(most, by_update[update])
        rising.append((update, most))
    return rising


def beyond(measured: RunDifferences, known: Noise, runs: RunSnapshots) -> list[Difference]:
    """Return what of MEASURED is more than rounding and KNOWN noise, in the order of updates.

    RUNS has the parameters.
    """
    parted = []
    typical: dict[int, float] = {}
    for (update, place), difference in measured.weights.items():
        if update not in typical:
            typical[update] = _typical(known, runs, update)
        parameter = runs.parameters[place.rank][place.optimizer, update][place.at]
        own = _until(known.weights.get(place, ()), update)
        allowed = max(_rounding(parameter, update), _NOISE * max(own, typical[update]))
        if not difference.apart <= allowed:
            parted.append((update, place, difference._replace(allowed=allowed)))
    for (update, rank), difference in measured.losses.items():
        ulps = max(_FEWEST_ULPS, _ULPS_PER_UPDATE * update)
        allowed = max(
            ulps * _UNITS["float32"] * difference.largest,
            _NOISE * _until(known.losses.get(rank, ()), update),
        )
        if not difference.apart <= allowed:
            # The loss of an update comes before its weights.
            parted.append(
                (update, ParameterPlace(rank, -1, 0), difference._replace(allowed=allowed))
            )
    return [difference for _, _, difference in sorted(parted, key=lambda row: row[:2])]


def _typical(known: Noise, runs: RunSnapshots, update: int) -> float:
    """Return the median of the noise of all parameters of RUNS: some are alike by chance."""
    count = sum(
        len(parameters)
        for own in runs.parameters.values()
        for (_, made), parameters in own.items()
        if made == update
    )
    noisy = sorted(
        (_until(by_update, update) for by_update in known.weights.values()), reverse=True
    )
    return noisy[count // 2] if count // 2 < len(noisy) else 0.0


def largest(differences: Iterable[Difference]) -> Difference | None:
    """Return the largest difference, in the numbers themselves."""
    return max(differences, key=lambda difference: difference.apart, default=None)


def ranks_apart(runs: RunSnapshots, axes: RankAxes | None) -> Difference | None:
    """Return the first difference of ranks that, by AXES, hold copies of one parameter."""
    for update in runs.updates():
        held: dict[object, tuple[int, Parameter]] = {}
        for rank, own in sorted(runs.parameters.items()):
            for (optimizer, made), parameters in own.items():
                if made != update:
                    continue
                for index, parameter in enumerate(parameters):
                    copy = (optimizer, index, parameter.size, _owner(rank, parameter.kind, axes))
                    first, known = held.setdefault(copy, (rank, parameter))
                    if first == rank or known.checksum == parameter.checksum:
                        continue
                    apart = _apart(known, parameter)
                    allowed = _rounding(known, max(1, update))
                    if not apart <= allowed:
                        return Difference(
                            update, rank, parameter.name, apart, known.largest, allowed, first
                        )
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


def _until(rising: Sequence[tuple[int, float]], update: int) -> float:
    return max((most for made, most in rising if made <= update), default=0.0)


def _rounding(parameter: Parameter, update: int) -> float:
    """Return the difference of PARAMETER that rounding may have caused by UPDATE."""
    unit = _UNITS.get(parameter.dtype, 0.0)
    return _ULPS_PER_UPDATE * update * unit * parameter.largest


def _apart(first: Parameter, other: Parameter) -> float:
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
    apart = abs(first - other)
    return math.inf if math.isnan(apart) else apart
