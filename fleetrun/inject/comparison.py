"""Finds where the ranks' copies of parameters differ, by checksums and then by values.

First every rank sends one checksum of its parameters of each kind. Only if copies differ does each
parameter get one, and those that differ are compared one by one. Differences by rounding are
allowed: kernels differ between devices. Parameters that no gradient trains are left out, such as
running statistics, which each rank computes from its own data.

Whatever the result, all ranks run the same collectives in the same order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from . import border, checksums, topology
from .replicas import KINDS, ComparedRanks, Part, reference

# Bits: gradients train the parameter; its gradients are sparse.
TRAINED, SPARSE = 1, 2
# The most parameters or ranks that a note names.
_MOST_NAMES = 4
# The difference that one update may cause, in units in the last place.
_ULPS_PER_UPDATE = 4
# This many rows of a table with sparse gradients, or one in this many, may differ. Adam on CPUs
# reads one number past the list of rows with gradients (seen with 2.6.2 and 3.3.1, in one process,
# too), and updates that row as well if there is one.
_FEW, _ONE_IN = 8, 100_000
# Sent by a rank that could not compute its numbers.
FAILED = -1
# The name of this check in remarks.
WHAT = "the comparison of ranks"
# A rank's result for a parameter: equal to the last bit, within rounding, but for a few rows, or
# none of these.
_EXACT, _ROUNDED, _FEW_ROWS, _APART = range(4)
# Why a difference is tolerated.
_UNTRAINED = "which was not compared: no gradient trains it, as with running statistics"
_TABLE = "in a few rows, which Paddle's own updates of sparse tables can cause"


class Differences(NamedTuple):
    """The places where copies of parameters differ."""

    # The number of ranks that hold the same parameters as this one, and of these parameters.
    ranks: int = 0
    parameters: int = 0
    # Whether this rank's copies are equal to the last bit.
    is_exact: bool = True
    # Where this rank's copies differ by more than rounding, and whether those of any rank do.
    difference: str = ""
    is_any_apart: bool = False
    # By the reason: the parameters whose differences are tolerated.
    tolerated: Mapping[str, Sequence[str]] = {}


class OwnSums(NamedTuple):
    """The parameters of this rank, the checksum of each, and its bits."""

    parts: Mapping[str, Part]
    sums: list[int]
    bits: list[int]

    def of_kind(self, kind: int) -> list[int]:
        """Return the checksums of the parameters of KIND."""
        return [own for part, own in zip(self.parts.values(), self.sums) if part.kind == kind]

    @property
    def numbers(self) -> list[int]:
        """The number of parameters of each kind, and their checksum."""
        by_kind = map(self.of_kind, KINDS)
        return [
            number for own in by_kind for number in (len(own), zlib.crc32(json.dumps(own).encode()))
        ]


@border.watching(WHAT)
def own_sums(find: Callable[[], Mapping[str, Part]], seen: Callable[[Part], int]) -> OwnSums:
    """Return the checksums of the parameters that FIND returns; SEEN returns the bits of one."""
    parts = find()
    sums = checksums.of_values([part.value for part in parts.values()])
    return OwnSums(parts, sums, [*map(seen, parts.values())])


def compare(own: OwnSums, rows: list[list[int]], ranks: ComparedRanks, updates: int) -> Differences:
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
    counts = [len(own.of_kind(kind)) for kind in KINDS]
    compared = [kind for kind in KINDS if counts[kind] and len(copies[kind]) > 1]
    outcome = Differences(
        ranks=max((len(copies[kind]) for kind in compared), default=0),
        parameters=sum(counts[kind] for kind in compared),
    )
    if not all(_is_one_to_a_place(places[kind], rows, 2 * kind, 1) for kind in KINDS):
        differing = [sorted({rows[peer][2 * kind] for peer in copies[kind]}) for kind in KINDS]
        unequal = next((numbers for numbers in differing if len(numbers) > 1), None)
        difference = unequal and f"ranks have different numbers of parameters: {unequal}"
        return outcome._replace(is_exact=False, difference=difference or "", is_any_apart=True)
    if all(_is_one_to_a_place(places[kind], rows, 2 * kind, 2) for kind in KINDS):
        return outcome
    longest = max(sum(row[::2]) for row in rows)
    rest = [0] * (longest - len(own.sums))
    table = ranks.gather([*own.sums, *rest, *own.bits, *rest])
    copied = {}
    for index, (name, part) in enumerate(own.parts.items()):
        sums = {ranks.ranks[peer]: table[peer][index] for peer in copies[part.kind]}
        by_any = 0
        for peer in copies[part.kind]:
            by_any |= table[peer][longest + index]
        copied[name] = _Copied(part, sums, by_any)
    return _compare_each(copied, ranks, _ULPS_PER_UPDATE * updates, longest, outcome)


def _is_one_to_a_place(
    places: Sequence[object], rows: list[list[int]], start: int, size: int
) -> bool:
    """Whether the SIZE numbers of ROWS from START on are equal on all ranks of the same place."""
    numbers = {(place, *row[start : start + size]) for place, row in zip(places, rows)}
    return len(numbers) == len(set(places))


class _Copied(NamedTuple):
    """A parameter, the checksums of its copies by rank, and the bits that any of these has set."""

    part: Part
    sums: dict[int, int]
    seen: int

    def judge(self, index: int, ranks: ComparedRanks, ulps: float) -> int:
        """Return how this rank's copy of the parameter INDEX differs from those of RANKS."""
        array = checksums.as_array(self.part.value)
        number = ranks.apart(index, self.sums, array, ulps)
        if not number:
            return _ROUNDED
        rows = array.shape[0] if array.ndim else 1
        is_few = number <= min(max(_FEW, rows // _ONE_IN), rows // 100)
        return _FEW_ROWS if is_few and self.seen & SPARSE else _APART


def _compare_each(
    copied: dict[str, _Copied],
    ranks: ComparedRanks,
    ulps: float,
    longest: int,
    outcome: Differences,
) -> Differences:
    """Compare the parameters one by one; LONGEST is the largest number of them on any rank."""
    tolerated: dict[str, list[str]] = {}
    states = [_EXACT] * longest
    for index, (name, copy) in enumerate(copied.items()):
        if len({*copy.sums.values()}) > 1:
            if copy.seen & TRAINED:
                states[index] = copy.judge(index, ranks, ulps)
            else:
                tolerated.setdefault(_UNTRAINED, []).append(name)
    table = ranks.gather(states)
    untrained = sum(map(len, tolerated.values()))
    difference = ""
    for index, (name, copy) in enumerate(copied.items()):
        by_rank = {rank: table[ranks.ranks.index(rank)][index] for rank in copy.sums}
        if _FEW_ROWS in by_rank.values():
            tolerated.setdefault(_TABLE, []).append(name)
        bad = [rank for rank, state in by_rank.items() if state == _APART]
        if bad and not difference:
            differ = _these_ranks(bad, reference(copy.sums), len(copy.sums))
            shape = list(checksums.as_array(copy.part.value).shape)
            difference = f"{differ} in the parameter {name} of shape {shape}"
    return outcome._replace(
        parameters=outcome.parameters - untrained,
        is_exact=max(states, default=_EXACT) == _EXACT,
        difference=difference,
        is_any_apart=any(_APART in row for row in table),
        tolerated=tolerated,
    )


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
