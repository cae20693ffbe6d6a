"""Finds where the ranks' copies of parameters differ, by checksums and then by values.

First every rank sends one checksum of its parameters of each kind, computed in place. Only if
copies differ does each parameter get one, and those that differ are compared one by one.
Differences by rounding are allowed: kernels differ between devices. Running statistics are left
out, as each rank computes them from its own data; see `parameter_history`.

Whatever the result, all ranks run the same collectives in the same order.
"""

from __future__ import annotations

import functools
import json
import operator
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import border, checksums, topology
from .replicas import KINDS, Part, reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .parameter_history import ParameterHistory
    from .replicas import GroupRanks, StaticRanks

# Bits: gradients train the parameter; a forward writes it; its gradients are sparse.
_TRAINED, _WRITTEN, _SPARSE = 1, 2, 4
# The most parameters or ranks that a note names.
_MOST_NAMES = 4
# The difference that one update may cause, in units in the last place.
_ULPS_PER_UPDATE = 4
# This many rows of a table with sparse gradients, or one in this many, may differ. Adam on CPUs
# reads one number past the list of rows with gradients (seen with 2.6.2 and 3.3.1, in one process,
# too). If that number, such as the size of the next block of memory, is a valid row, Adam updates
# that row.
_FEW, _ONE_IN = 8, 100_000
# Sent by a rank that could not compute its numbers.
FAILED = -1
# The name of this check in remarks.
WHAT = "the comparison of ranks"
# A rank's result: equal to the last bit, within rounding, or neither.
_EXACT, _ROUNDED, _APART = range(3)


class Differences(NamedTuple):
    """The places where copies of parameters differ."""

    # The number of ranks that hold the same parameters as this one, and of these parameters.
    ranks: int = 0
    parameters: int = 0
    # Whether this rank's copies are equal to the last bit, and those of all ranks.
    is_exact: bool = True
    are_all_exact: bool = True
    # Where this rank's copies differ by more than rounding, and whether those of any rank do.
    difference: str = ""
    is_any_apart: bool = False
    # Tables that differ in a few rows, with a sentence; and running statistics that differ.
    tables: Mapping[str, str] = {}
    statistics: Sequence[str] = ()
    # The first rank that could not take part.
    failed: int | None = None


class OwnSums(NamedTuple):
    """The checksums of this rank's parameters: per kind, and per parameter if known."""

    parts: Mapping[str, Part]
    totals: list[int]
    sums: list[int] | None

    @property
    def numbers(self) -> list[int]:
        """The number of parameters of each kind, and their checksum."""
        counts = [sum(part.kind == kind for part in self.parts.values()) for kind in KINDS]
        return [number for pair in zip(counts, self.totals) for number in pair]


@border.watching(WHAT)
def own_sums(find: Callable[[], Mapping[str, Part]], known: ParameterHistory | None) -> OwnSums:
    """Return the checksums of the parameters that FIND returns."""
    parts = find()
    values = [part.value for part in parts.values()]
    if known is not None:
        known.record_gradients(part.parameter for part in parts.values())
    by_kind = [
        [index for index, part in enumerate(parts.values()) if part.kind == kind] for kind in KINDS
    ]
    if known is None or checksums.are_on_host(values):
        totals = [
            checksums.of_all(_array(values[index]) for index in indexes) for indexes in by_kind
        ]
        return OwnSums(parts, totals, None)
    # On a device checksums of each parameter cost no more than one of all.
    sums = checksums.of_tensors(values)
    totals = [
        zlib.crc32(json.dumps([sums[index] for index in indexes]).encode()) for indexes in by_kind
    ]
    return OwnSums(parts, totals, sums)


def compare(
    own: OwnSums,
    rows: list[list[int]],
    ranks: GroupRanks | StaticRanks,
    known: ParameterHistory | None,
    updates: int,
) -> Differences:
    """Compare the parameters of this rank, OWN, with their copies on RANKS after UPDATES updates.

    ROWS are the `numbers` of all RANKS.
    """
    places = [ranks.places(kind) for kind in KINDS]
    me = ranks.ranks.index(ranks.rank)
    # By kind: the indexes of the ranks that hold copies of what this rank holds.
    copies = [
        [index for index, place in enumerate(places[kind]) if place == places[kind][me]]
        for kind in KINDS
    ]
    counts = [own.numbers[2 * kind] for kind in KINDS]
    compared = [kind for kind in KINDS if counts[kind] and len(copies[kind]) > 1]
    outcome = Differences(
        ranks=max((len(copies[kind]) for kind in compared), default=0),
        parameters=sum(counts[kind] for kind in compared),
    )
    consistent = [_is_one_to_a_place(places[kind], rows, 2 * kind, 1) for kind in KINDS]
    if not all(consistent):
        differing = [sorted({rows[peer][2 * kind] for peer in copies[kind]}) for kind in KINDS]
        unequal = next((numbers for numbers in differing if len(numbers) > 1), None)
        difference = unequal and f"ranks have different numbers of parameters: {unequal}"
        return outcome._replace(
            is_exact=False, are_all_exact=False, difference=difference or "", is_any_apart=True
        )
    if all(_is_one_to_a_place(places[kind], rows, 2 * kind, 2) for kind in KINDS):
        return outcome
    longest = max(sum(row[::2]) for row in rows)
    columns = own_sums_of_each(own, known) or [[FAILED] * longest] * 2
    table, seen_by = (ranks.gather(column + [0] * (longest - len(column))) for column in columns)
    failed = [rank for rank, row in zip(ranks.ranks, seen_by) if row[0] == FAILED]
    if failed:
        return outcome._replace(failed=failed[0])
    copied = {
        name: _Copied(
            part,
            {ranks.ranks[peer]: table[peer][index] for peer in copies[part.kind]},
            # A parameter has a bit if any rank has seen it.
            functools.reduce(operator.or_, (seen_by[peer][index] for peer in copies[part.kind])),
        )
        for index, (name, part) in enumerate(own.parts.items())
    }
    return _compare_each(copied, ranks, _ULPS_PER_UPDATE * updates, longest, outcome)


def _is_one_to_a_place(
    places: Sequence[object], rows: list[list[int]], start: int, size: int
) -> bool:
    """Whether the SIZE numbers of ROWS from START on are equal on all ranks of the same place."""
    seen = {(place, *row[start : start + size]) for place, row in zip(places, rows)}
    return len(seen) == len(set(places))


class _Copied(NamedTuple):
    """A parameter, the checksums of its copies by rank, and the bits that any of these has set."""

    part: Part
    sums: dict[int, int]
    seen: int

    def is_few(self, rows: int, shape: Sequence[int]) -> bool:
        """Whether ROWS are few enough to differ by Paddle's updates of sparse tables."""
        return not rows or (self.seen & _SPARSE > 0 and rows <= _most_few(_rows(shape)))


def _compare_each(
    copied: dict[str, _Copied],
    ranks: GroupRanks | StaticRanks,
    ulps: float,
    longest: int,
    outcome: Differences,
) -> Differences:
    """Compare the parameters one by one; LONGEST is the largest number of them on any rank."""
    statistics = []
    state = _EXACT
    apart = [0] * longest
    for index, (name, copy) in enumerate(copied.items()):
        if len({*copy.sums.values()}) == 1:
            continue
        if copy.seen & ~_SPARSE != _TRAINED:
            statistics.append(name)
            continue
        array = _array(copy.part.value)
        apart[index] = ranks.apart(copy.part.kind, copy.sums, array, ulps)
        is_few = copy.is_few(apart[index], array.shape)
        state = max(state, _ROUNDED if is_few else _APART)
    states, *columns = zip(*ranks.gather([state, *apart]))
    tables = {}
    difference = ""
    for (name, copy), column in zip(copied.items(), columns):
        rows = {rank: column[ranks.ranks.index(rank)] for rank in copy.sums}
        most = max(rows.values())
        if not most or difference:
            continue
        shape = list(_array(copy.part.value).shape)
        is_few = copy.is_few(most, shape)
        bad = [rank for rank, apart_rows in rows.items() if apart_rows]
        where = f"{most} of {_rows(shape)} rows of " if is_few else ""
        differ = _these_ranks(bad, reference(copy.sums), len(rows))
        text = f"{differ} in {where}the parameter {name} of shape {shape}"
        if is_few:
            tables[name] = text
        else:
            difference = text
    return outcome._replace(
        parameters=outcome.parameters - len(statistics),
        is_exact=state == _EXACT,
        are_all_exact=max(states) == _EXACT,
        difference=difference,
        is_any_apart=max(states) == _APART,
        tables=tables,
        statistics=statistics,
    )


@border.watching(WHAT)
def own_sums_of_each(own: OwnSums, known: ParameterHistory | None) -> list[list[int]]:
    """Return the checksum of each parameter, and the bits that this rank has recorded for it."""
    sums = own.sums or [checksums.of_array(_array(part.value)) for part in own.parts.values()]
    # Of a static program, what the forward writes is not among the parts.
    bits = [
        _TRAINED
        if known is None
        else _TRAINED * known.is_trained(part.parameter)
        | _WRITTEN * known.is_written(part.parameter)
        | _SPARSE * known.is_sparse(part.parameter)
        for part in own.parts.values()
    ]
    return [sums, bits]


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _most_few(size: int) -> int:
    """Return how many of SIZE rows count as few.

    >>> [_most_few(size) for size in (80, 600, 10_000, 9_000_000)]
    [0, 6, 8, 90]
    """
    return min(max(_FEW, size // _ONE_IN), size // 100)


def _these_ranks(bad: Sequence[int], first: int, size: int) -> str:
    """Describe how the ranks BAD differ from the rank FIRST, of SIZE ranks with copies.

    >>> _these_ranks([1], 0, 2), _these_ranks([1, 3], 0, 4)
    ('rank 1 and rank 0 differ', 'rank 1, rank 3 differ from rank 0')
    """
    names = [topology.label(rank) for rank in bad]
    if size == 2:
        return f"{names[0]} and {topology.label(first)} differ"
    differ = "differs" if len(bad) == 1 else "differ"
    return f"{listed(names)} {differ} from {topology.label(first)}"


def listed(names: Sequence[str]) -> str:
    """Join the first of NAMES, and count the others.

    >>> listed(["a", "b"]), listed(list("abcdef"))
    ('a, b', 'a, b, c, d and 2 more')
    """
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _array(value: Any) -> Any:
    import numpy as np

    return value.numpy() if hasattr(value, "numpy") else np.array(value)
