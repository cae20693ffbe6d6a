"""Measures whether a two-level allreduce is faster than a flat one.

`use_hierarchical_allreduce: auto` depends on the network between hosts, on what connects the ranks
of a host, and on what the backend does by itself (NCCL's rings and trees know the hosts, too). So
both are tried once for each size of bucket. All ranks decide by the same sums over the ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .. import communicators, settings
from ..buckets import MEBIBYTE
from ..evidence import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..communicators import Communicator
    from ..spec import Topology

FIELD, SIZE, AUTO = "use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks", "auto"
# Two levels must take less than this share of the time, as they keep more ranks busy.
_WORTH = 0.95
# The most buckets under way at a time, and the largest: the slowest networks take a second.
_MOST, _MOST_BYTES = 3, 4 * MEBIBYTE
# How often both are timed, after an uncounted round.
_ROUNDS = 4
_MICRO, _LARGEST = 1e6, 2**31 - 1
# Returns seconds.
clock = time.perf_counter


# The result and its reason, by all that it depends on; a script may make many models.
_measured: dict[tuple[object, ...], tuple[bool, str]] = {}


def choose(
    ranks: Sequence[int], bucket_bytes: Sequence[int], topology: Topology, place: Any
) -> tuple[int | None, str]:
    """Return the size of groups among RANKS (None: one level) and, with `auto`, why.

    The model has buckets of BUCKET_BYTES at PLACE. A collective call: all RANKS must make it.
    """
    asked = settings.effective(FIELD)
    size = group_size(ranks, topology) if asked else 1
    if not 1 < size < len(ranks):
        return None, settings.one_level(size, len(ranks)) if asked == AUTO else ""
    if asked != AUTO:
        return size, ""
    number, nbytes = min(_MOST, len(bucket_bytes)), min(_MOST_BYTES, max(bucket_bytes))
    key = (*ranks, size, settings.overlaps(), number, nbytes)
    if key not in _measured:
        ways = [communicators.take(ranks, levels, 1)[0] for levels in (None, size)]
        one_s, two_s = _timed(ways, number, nbytes, ranks, place)
        _measured[key] = two_s < one_s * _WORTH, _described(number, nbytes, one_s, two_s)
        if not _measured[key][0]:
            communicators.drop(ranks, size)
    are_two, why = _measured[key]
    return (size if are_two else None), why


def _described(number: int, nbytes: int, one_s: float, two_s: float) -> str:
    """Describe the measured seconds of NUMBER allreduces of NBYTES with one level and with two.

    >>> _described(3, 1 << 20, 0.012, 0.0094)
    'measured: two levels take 9.4 ms for 3 allreduces of 1 MB, one takes 12 ms'
    """
    return (
        f"measured: two levels take {two_s * 1e3:.3g} ms for {plural(number, 'allreduce')} of"
        f" {nbytes / MEBIBYTE:.3g} MB, one takes {one_s * 1e3:.3g} ms"
    )


def group_size(ranks: Sequence[int], topology: Topology) -> int:
    """Return the number of RANKS in a group."""
    return int(settings.effective(SIZE) or 0) or communicators.ranks_together(
        ranks, topology.ranks_per_group or topology.ranks_per_node
    )


def _timed(
    ways: Sequence[Communicator], number: int, nbytes: int, ranks: Sequence[int], place: Any
) -> list[float]:
    """Return the mean seconds over RANKS of NUMBER sums of NBYTES at PLACE by each of WAYS."""
    import numpy as np
    import paddle

    first = ways[0]
    times: list[list[float]] = [[] for _ in ways]
    with paddle.no_grad():
        # Not the device that the script may have chosen.
        flats = [
            paddle.to_tensor(np.zeros(max(nbytes // 4, 1), "float32"), place=place)
            for _ in range(number)
        ]
        for _ in range(_ROUNDS + 1):
            for way, taken in zip(ways, times):
                # All ranks begin at once.
                first.sum_integers([0], place)
                began_s = clock()
                _sum(way, flats)
                taken.append(clock() - began_s)
    middles = [sorted(taken[1:])[_ROUNDS // 2] for taken in times]
    # Sums of 32 bits.
    most = _LARGEST // len(ranks)
    sums = first.sum_integers([min(round(middle * _MICRO), most) for middle in middles], place)
    return [total / len(ranks) / _MICRO for total in sums]


def _sum(communicator: Communicator, flats: Sequence[Any]) -> None:
    """Sum FLATS as a backward does, and wait for all; not counted."""
    works = [communicator.all_reduce(flat, overlaps=settings.overlaps()) for flat in flats]
    communicator.calls -= len(flats)
    for work in works:
        if work is not None:
            work.wait()
    if not communicators.is_synchronous():
        import paddle

        # `wait` holds up the stream, not the host. This is before the first step.
        paddle.device.synchronize()
