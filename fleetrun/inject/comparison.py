"""Finds the first parameter in which ranks differ, by checksums and then by values.

First every rank sends one checksum of all its parameters. Only if these differ does each parameter
get one, and those that differ are compared one by one. Differences by rounding are allowed: kernels
differ between devices. Parameters that no gradient trains are left out, such as running statistics,
which each rank computes from its own data.

Whatever the result, all ranks run the same collectives in the same order.
"""

from __future__ import annotations

import functools
import json
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from . import border, checksums, topology
from .replicas import ComparedRanks, Part, reference

# Bits: gradients train the parameter; its gradients are sparse.
TRAINED, SPARSE = 1, 2
# The difference that one update may cause, in units in the last place.
_ULPS_PER_UPDATE = 4
# The most rows of a table with sparse gradients that may differ, and at most one in so many. Adam
# on CPUs reads one number past the list of rows with gradients (seen with 2.6.2 and 3.3.1, in one
# process, too), and updates that row if it exists.
_FEW, _ONE_IN = 8, 100
# The most parameters or ranks that a note names.
_MOST_NAMES = 4
# The count of a rank that could not compute its numbers.
_FAILED = -1
# The name of this check in remarks.
WHAT = "the comparison of ranks"


class Comparison(NamedTuple):
    """What a comparison has found; the same on all ranks but for `is_exact`."""

    # How many parameters were compared.
    parameters: int = 0
    # Whether this rank's copies are equal to the last bit.
    is_exact: bool = True
    # The first parameter that differs by more than rounding, as a clause.
    difference: str = ""
    # Tables that differ in a few rows, and parameters that differ untrained.
    tables: Sequence[str] = ()
    untrained: Sequence[str] = ()
    # The rank that could not take part.
    failed: int | None = None


class _Own(NamedTuple):
    """The parameters of this rank, the checksum of each, and its bits."""

    parts: Mapping[str, Part]
    sums: list[int]
    bits: list[int]


@border.watching(WHAT)
def _read(parts: Mapping[str, Part], seen: Callable[[Part], int]) -> _Own:
    sums = checksums.of_values([part.value for part in parts.values()])
    return _Own(parts, sums, [*map(seen, parts.values())])


def compare(
    parts: Mapping[str, Part], seen: Callable[[Part], int], ranks: ComparedRanks, updates: int
) -> Comparison:
    """Compare PARTS, by name, with their copies on RANKS after UPDATES updates.

    SEEN returns the bits of one.
    """
    own = _read(parts, seen)
    numbers = [_FAILED, 0]
    if own is not None:
        numbers = [len(own.sums), zlib.crc32(json.dumps(own.sums).encode())]
    rows = ranks.gather(numbers)
    failed = [rank for rank, row in zip(ranks.ranks, rows) if row[0] == _FAILED]
    if failed or own is None:
        return Comparison(failed=failed[0])
    counts = sorted({row[0] for row in rows})
    if len(counts) > 1:
        return Comparison(difference=f"ranks have different numbers of parameters: {counts}")
    if all(row == rows[0] for row in rows):
        return Comparison(len(own.sums))
    return _compare_each(own, ranks, _ULPS_PER_UPDATE * updates)


def _compare_each(own: _Own, ranks: ComparedRanks, ulps: float) -> Comparison:
    """Compare the parameters one by one."""
    count = len(own.sums)
    columns = [*zip(*ranks.gather([*own.sums, *own.bits]))]
    sums = [dict(zip(ranks.ranks, column)) for column in columns[:count]]
    bits = [functools.reduce(operator.or_, column) for column in columns[count:]]
    apart, untrained, is_exact = [0] * count, [], True
    for index, (name, part) in enumerate(own.parts.items()):
        if len({*sums[index].values()}) == 1:
            continue
        if bits[index] & TRAINED:
            is_exact = False
            apart[index] = ranks.apart(sums[index], checksums.as_array(part.value), ulps)
        else:
            untrained.append(name)
    tables, difference = [], ""
    for (name, part), rows, own_sums, bit in zip(
        own.parts.items(), zip(*ranks.gather(apart)), sums, bits
    ):
        if not any(rows):
            continue
        shape = list(checksums.as_array(part.value).shape)
        if bit & SPARSE and max(rows) <= min(_FEW, shape[0] // _ONE_IN):
            tables.append(name)
        elif not difference:
            bad = [rank for rank, number in zip(ranks.ranks, rows) if number]
            differ = _these_ranks(bad, reference(own_sums), len(ranks.ranks))
            difference = f"{differ} in the parameter {name} of shape {shape}"
    return Comparison(count - len(untrained), is_exact, difference, tables, untrained)


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
