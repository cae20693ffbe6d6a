"""Finds the first parameter in which ranks differ, by checksums and then by values.

First every rank sends one checksum of all its parameters. Only if these differ does each parameter
get one, and those that differ are compared one by one. Differences by rounding are allowed: kernels
differ between devices. Parameters that no dense gradient trains are left out: running statistics,
which each rank computes from its own data, and tables with sparse gradients, of which Paddle's Adam
on CPUs updates a row beyond those with gradients (seen with 2.6.2 and 3.3.1, in one process, too).

Whatever the result, all ranks run the same collectives in the same order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from . import border, checksums, topology
from .replicas import ComparedRanks, Part, reference

# The difference that one update may cause, in units in the last place.
_ULPS_PER_UPDATE = 4
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
    # The parameters that differ and are left out.
    left_out: Sequence[str] = ()
    # The rank that could not take part.
    failed: int | None = None


class _Own(NamedTuple):
    """The parameters of this rank, the checksum of each, and whether gradients train it."""

    parts: Mapping[str, Part]
    sums: list[int]
    trained: list[int]


@border.watching(WHAT)
def _read(parts: Mapping[str, Part], is_trained: Callable[[Part], bool]) -> _Own:
    sums = checksums.of_values([part.value for part in parts.values()])
    return _Own(parts, sums, [int(is_trained(part)) for part in parts.values()])


def compare(
    parts: Mapping[str, Part],
    is_trained: Callable[[Part], bool],
    ranks: ComparedRanks,
    updates: int,
) -> Comparison:
    """Compare PARTS, by name, with their copies on RANKS after UPDATES updates.

    IS_TRAINED: whether dense gradients of this rank train one.
    """
    own = _read(parts, is_trained)
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
    columns = [*zip(*ranks.gather([*own.sums, *own.trained]))]
    sums = [dict(zip(ranks.ranks, column)) for column in columns[:count]]
    apart, left_out, is_exact = [0] * count, [], True
    for index, (name, part) in enumerate(own.parts.items()):
        if len({*sums[index].values()}) == 1:
            continue
        if any(columns[count + index]):
            is_exact = False
            apart[index] = ranks.apart(sums[index], checksums.as_array(part.value), ulps)
        else:
            left_out.append(name)
    difference = ""
    for (name, part), rows, own_sums in zip(own.parts.items(), zip(*ranks.gather(apart)), sums):
        if any(rows):
            shape = list(checksums.as_array(part.value).shape)
            bad = [rank for rank, number in zip(ranks.ranks, rows) if number]
            differ = _these_ranks(bad, reference(own_sums), len(ranks.ranks))
            difference = f"{differ} in the parameter {name} of shape {shape}"
            break
    return Comparison(count - len(left_out), is_exact, difference, left_out)


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
