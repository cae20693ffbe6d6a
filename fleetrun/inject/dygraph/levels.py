"""Whether an allreduce of two levels ends sooner than one of all ranks: it is measured.

The hosts alone cannot decide `use_hierarchical_allreduce: auto`: it depends on their network, on
what connects the ranks of a host, and on what the backend does by itself (NCCL's rings and trees
know the hosts, too). So both are tried at the start with sums as large as the model's buckets. All
ranks decide by sums over all of them, so they decide alike.
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
# Two levels have to take less than this share of the time: they keep more ranks busy.
_WORTH = 0.95
# As many buckets as are under way at a time, each of so many bytes at first: the slowest networks
# take a second for these.
_MOST, _FIRST_BYTES = 3, MEBIBYTE
# How often both are timed, after one time that does not count.
_ROUNDS = 4
# Buckets that are larger are tried, too, if that is known to take less than so many seconds.
_AFFORDED_S = 2.0
_MICRO, _LARGEST = 1e6, 2**31 - 1


class Levels(NamedTuple):
    """What NUMBER allreduces of NBYTES each were measured to take by each way, in seconds.

    IS_LEAST: of two levels, only what the leaders alone take was measured.
    """

    number: int
    nbytes: int
    one_s: float
    two_s: float
    is_least: bool = False

    @property
    def are_two(self) -> bool:
        """Whether two levels are faster by as much as pays."""
        return self.two_s < self.one_s * _WORTH

    def describe(self) -> str:
        """Say what was measured.

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
    """Chooses one level or two, as is asked for, or as is faster of what POOL makes."""

    def __init__(self, pool: Pool, topology: Topology) -> None:
        self._pool = pool
        self._topology = topology
        # By all that it depends on; a script may make many models.
        self._known: dict[tuple[object, ...], Levels] = {}

    def choose(
        self, ranks: Sequence[int], bucket_bytes: Sequence[int], group: Any, place: Any
    ) -> tuple[int | None, str]:
        """Return the size of groups among RANKS, None with one level, and why (with `auto`).

        The model has buckets of BUCKET_BYTES at PLACE, and GROUP is its own ProcessGroup. All
        RANKS must call it alike.
        """
        asked = settings.effective(FIELD)
        size = self._group_size(ranks) if asked else 1
        is_two = 1 < size < len(ranks)
        why = ""
        if asked == AUTO:
            why = settings.one_level(size, len(ranks))
            if is_two:
                known = self._measured(ranks, size, bucket_bytes, group, place)
                is_two, why = known.are_two, known.describe()
        return (size if is_two else None), why

    def _group_size(self, ranks: Sequence[int]) -> int:
        """Return how many of RANKS are to make a group."""
        return int(settings.effective(SIZE) or 0) or communicators.ranks_together(
            ranks, self._topology.ranks_per_group or self._topology.ranks_per_node
        )

    def _measured(
        self, ranks: Sequence[int], size: int, bucket_bytes: Sequence[int], group: Any, place: Any
    ) -> Levels:
        """Return what was measured for such a model, now or earlier."""
        nbytes = list(bucket_bytes) or [0]
        overlaps = settings.overlaps()
        key = (tuple(ranks), size, overlaps, len(nbytes), max(nbytes))
        known = self._known.get(key)
        if known is None:
            # Only Paddle 3 on GPUs frees communicators, each of which holds hundreds of megabytes
            # there. So one level has the model's own group, which nobody else uses yet, and of two
            # levels the leaders are first: where they alone take as long, nobody else needs any.
            one = [communicators.Communicator([group], place, overlaps=overlaps)]
            leaders = self._pool.leaders(ranks, size)
            made = [leaders] if leaders else []
            part = [communicators.Communicator([each], place, overlaps=overlaps) for each in made]
            nleaders = len(communicators.split_ranks(ranks, size).leaders)
            least = compare(one, part, nbytes, len(ranks), nleaders)
            known = Levels(*least[:4], is_least=True)
            communicators.release(part)
            if known.are_two:
                two = self._pool.take(ranks, size, 1, place, overlaps=overlaps)
                known = compare(one, two, nbytes, len(ranks), len(ranks))
                # The pool gives it to the model, if it is faster.
                communicators.release(two)
            communicators.release(one)
            if not known.are_two and hasattr(group, "shutdown"):
                self._pool.free_unused(ranks, size)
            self._known[key] = known
        return known


def compare(
    one: Sequence[Communicator],
    two: Sequence[Communicator],
    bucket_bytes: Sequence[int],
    nranks: int,
    nparts: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Levels:
    """Return what sums of BUCKET_BYTES take over ONE, of one level, and over TWO, of two.

    All NRANKS ranks must call it alike; they get the same. TWO may be of NPARTS of them only, and
    nothing on the others. CLOCK returns seconds.
    """
    number, largest = min(_MOST, len(bucket_bytes)), max(bucket_bytes)

    def timed(nbytes: int) -> Levels:
        one_s, two_s = _timed(((one, nranks), (two, nparts)), number, nbytes, clock)
        return Levels(number, nbytes, one_s, two_s)

    found = timed(min(largest, _FIRST_BYTES))
    if largest <= found.nbytes:
        return found
    rounds_s = (_ROUNDS + 1) * (found.one_s + found.two_s)
    return timed(largest) if rounds_s * largest / found.nbytes < _AFFORDED_S else found


def _timed(
    ways: Sequence[tuple[Sequence[Communicator], int]],
    number: int,
    nbytes: int,
    clock: Callable[[], float],
) -> list[float]:
    """Return what NUMBER sums of NBYTES take by each of WAYS: the mean over its ranks."""
    import paddle

    (one, nranks), *_ = ways
    times: list[list[float]] = [[] for _ in ways]
    with paddle.no_grad():
        flats = [one[0].zeros(nbytes) for _ in range(number)]
        for _ in range(_ROUNDS + 1):
            for (way, _), taken in zip(ways, times):
                # All ranks begin at once.
                one[0].sum_integers([0])
                began_s = clock()
                if way:
                    _sum(way, flats)
                taken.append(clock() - began_s if way else 0.0)
    middles = [sorted(taken[1:])[_ROUNDS // 2] for taken in times]
    # Sums of 32 bits.
    most = _LARGEST // nranks
    sums = one[0].sum_integers([min(round(each * _MICRO), most) for each in middles])
    return [each / members / _MICRO for each, (_, members) in zip(sums, ways)]


def _sum(way: Sequence[Communicator], flats: Sequence[object]) -> None:
    """Sum FLATS over the communicators of WAY in turn, as a backward does, and wait for all."""
    communicators.sum_uncounted(way, flats)
    if not communicators.is_synchronous():
        import paddle

        # `wait` holds up the stream, not the host. This is before the first step.
        paddle.device.synchronize()
