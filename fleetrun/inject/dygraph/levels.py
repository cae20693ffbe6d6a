"""Measures whether a two-level allreduce is faster than a flat one.

`use_hierarchical_allreduce: auto` depends on the network between hosts, on what connects the ranks
of a host, and on what the backend does by itself (NCCL's rings and trees know the hosts, too). So
both are tried at the start with sums as large as the model's buckets. All ranks decide by the same
sums over the ranks, so they agree.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import communicators, settings
from ..buckets import MEBIBYTE
from ..evidence import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..communicators import Communicator, Pool
    from ..spec import Topology

FIELD, SIZE, AUTO = "use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks", "auto"
# Two levels must take less than this share of the time, as they keep more ranks busy.
_WORTH = 0.95
# The most buckets under way at a time, and their size at first: the slowest networks take a second.
_MOST, _FIRST_BYTES = 3, MEBIBYTE
# How often both are timed, after an uncounted round.
_ROUNDS = 4
# Larger buckets are tried, too, if that is expected to take less than this.
_AFFORDED_S = 2.0
_MICRO, _LARGEST = 1e6, 2**31 - 1


class Levels(NamedTuple):
    """The measured seconds of NUMBER allreduces of NBYTES each with one level and with two.

    IS_LEAST: for two levels only the leaders were measured, so `two_s` is a lower bound.
    """

    number: int
    nbytes: int
    one_s: float
    two_s: float
    is_least: bool = False

    @property
    def are_two(self) -> bool:
        """Whether two levels are enough faster to be worth it."""
        return self.two_s < self.one_s * _WORTH

    def describe(self) -> str:
        """Describe what was measured.

        >>> Levels(3, 1 << 20, 0.012, 0.0094).describe()
        'measured: two levels take 9.4 ms for 3 allreduces of 1 MB, one takes 12 ms'
        """
        least = "at least " if self.is_least else ""
        return (
            f"measured: two levels take {least}{self.two_s * 1e3:.3g} ms for"
            f" {plural(self.number, 'allreduce')} of {self.nbytes / MEBIBYTE:.3g} MB,"
            f" one takes {self.one_s * 1e3:.3g} ms"
        )


class LevelChoice:
    """Chooses one level or two for the communicators of POOL, as requested or as measured."""

    def __init__(self, pool: Pool, topology: Topology) -> None:
        self._pool = pool
        self._topology = topology
        # Keyed by all that the result depends on; a script may make many models.
        self._known: dict[tuple[object, ...], Levels] = {}

    def choose(
        self, ranks: Sequence[int], bucket_bytes: Sequence[int], group: Any, place: Any
    ) -> tuple[int | None, str]:
        """Return the size of groups among RANKS (None: one level) and, with `auto`, why.

        The model has buckets of BUCKET_BYTES at PLACE, and GROUP is its own ProcessGroup. A
        collective call: all RANKS must make it.
        """
        asked = settings.effective(FIELD)
        size = self._group_size(ranks) if asked else 1
        is_two = 1 < size < len(ranks)
        why = ""
        if asked == AUTO:
            why = settings.one_level(size, len(ranks))
            if is_two:
                measured = self._measured(ranks, size, bucket_bytes, group, place)
                is_two, why = measured.are_two, measured.describe()
        return (size if is_two else None), why

    def _group_size(self, ranks: Sequence[int]) -> int:
        """Return the number of RANKS in a group."""
        return int(settings.effective(SIZE) or 0) or communicators.ranks_together(
            ranks, self._topology.ranks_per_group or self._topology.ranks_per_node
        )

    def _measured(
        self, ranks: Sequence[int], size: int, bucket_bytes: Sequence[int], group: Any, place: Any
    ) -> Levels:
        """Return the measurement for such a model, made now or earlier."""
        nbytes = list(bucket_bytes) or [0]
        overlaps = settings.overlaps()
        key = (tuple(ranks), size, overlaps, len(nbytes), max(nbytes))
        measured = self._known.get(key)
        if measured is None:
            # Only Paddle 3 on GPUs frees communicators, each of which holds hundreds of megabytes
            # there. So one level uses the model's own group, which nobody else uses yet, and of two
            # levels the leaders come first: if they alone take as long, no other is needed.
            flat = [communicators.Communicator([group], place, overlaps=overlaps)]
            leaders = self._pool.leaders(ranks, size)
            upper = (
                [communicators.Communicator([leaders], place, overlaps=overlaps)] if leaders else []
            )
            nleaders = len(communicators.split_ranks(ranks, size).leaders)
            least = compare(flat, upper, nbytes, len(ranks), nleaders)
            measured = Levels(*least[:4], is_least=True)
            communicators.release(upper)
            if measured.are_two:
                both = self._pool.take(ranks, size, 1, place, overlaps=overlaps)
                measured = compare(flat, both, nbytes, len(ranks), len(ranks))
                # The pool gives them to the model if they are faster.
                communicators.release(both)
            communicators.release(flat)
            if not measured.are_two and hasattr(group, "shutdown"):
                self._pool.free_unused(ranks, size)
            self._known[key] = measured
        return measured


def compare(
    flat: Sequence[Communicator],
    levelled: Sequence[Communicator],
    bucket_bytes: Sequence[int],
    nranks: int,
    nparts: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Levels:
    """Time sums of BUCKET_BYTES over the communicators FLAT (one level) and LEVELLED (two).

    A collective call: all NRANKS ranks must make it, and get the same result. LEVELLED may exist on
    NPARTS of them only, and be empty on the others. CLOCK returns seconds.
    """
    number, largest = min(_MOST, len(bucket_bytes)), max(bucket_bytes)

    def timed(nbytes: int) -> Levels:
        one_s, two_s = _timed(((flat, nranks), (levelled, nparts)), number, nbytes, clock)
        return Levels(number, nbytes, one_s, two_s)

    measured = timed(min(largest, _FIRST_BYTES))
    if largest <= measured.nbytes:
        return measured
    rounds_s = (_ROUNDS + 1) * (measured.one_s + measured.two_s)
    return timed(largest) if rounds_s * largest / measured.nbytes < _AFFORDED_S else measured


def _timed(
    ways: Sequence[tuple[Sequence[Communicator], int]],
    number: int,
    nbytes: int,
    clock: Callable[[], float],
) -> list[float]:
    """Return the seconds of NUMBER sums of NBYTES by each of WAYS, averaged over its ranks."""
    import paddle

    (flat, nranks), *_ = ways
    times: list[list[float]] = [[] for _ in ways]
    with paddle.no_grad():
        flats = [flat[0].zeros(nbytes) for _ in range(number)]
        for _ in range(_ROUNDS + 1):
            for (way, _), taken in zip(ways, times):
                # All ranks begin at once.
                flat[0].sum_integers([0])
                began_s = clock()
                if way:
                    _sum(way, flats)
                taken.append(clock() - began_s if way else 0.0)
    middles = [sorted(taken[1:])[_ROUNDS // 2] for taken in times]
    # Sums of 32 bits.
    most = _LARGEST // nranks
    sums = flat[0].sum_integers([min(round(middle * _MICRO), most) for middle in middles])
    return [total / members / _MICRO for total, (_, members) in zip(sums, ways)]


def _sum(way: Sequence[Communicator], flats: Sequence[object]) -> None:
    """Sum FLATS over the communicators of WAY in turn, as a backward does, and wait for all."""
    communicators.sum_uncounted(way, flats)
    if not communicators.is_synchronous():
        import paddle

        # `wait` holds up the stream, not the host. This is before the first step.
        paddle.device.synchronize()
