"""Chooses the buckets that end a step soonest from measured times; pure.

As in MG-WFBP (Shi, Chu and Li, INFOCOM 2019): an allreduce of n bytes takes a + b n seconds, one
follows the other, and a bucket begins when its last gradient is ready and the previous one has
ended. Larger buckets save startups, smaller ones begin earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


class AllReduceCost(NamedTuple):
    """The cost of an allreduce: seconds for its startup, and for each byte."""

    startup_s: float
    byte_s: float

    def of(self, nbytes: int) -> float:
        """Return the seconds of an allreduce of NBYTES."""
        return self.startup_s + self.byte_s * nbytes


def fit(samples: Sequence[tuple[int, float]]) -> AllReduceCost:
    """Return the cost that fits SAMPLES of bytes and seconds best, by relative errors.

    >>> cost = fit([(1000, 0.002), (5000, 0.006), (9000, 0.010)])
    >>> round(cost.startup_s, 9), round(cost.byte_s, 12)
    (0.001, 1e-06)
    """
    # Weighted least squares, with the inverse squares of the seconds as weights.
    rows = [(1 / seconds**2, nbytes, seconds) for nbytes, seconds in samples if seconds > 0]
    if not rows:
        return AllReduceCost(0.0, 0.0)
    total = sum(weight for weight, _, _ in rows)
    mean_bytes = sum(weight * nbytes for weight, nbytes, _ in rows) / total
    mean_s = sum(weight * seconds for weight, _, seconds in rows) / total
    spread = sum(weight * (nbytes - mean_bytes) ** 2 for weight, nbytes, _ in rows)
    slope = sum(
        weight * (nbytes - mean_bytes) * (seconds - mean_s) for weight, nbytes, seconds in rows
    )
    byte_s = max(0.0, slope / spread) if spread else 0.0
    startup_s = mean_s - byte_s * mean_bytes
    if startup_s < 0:
        # Attribute the whole cost to the bytes.
        return AllReduceCost(0.0, mean_s / mean_bytes)
    return AllReduceCost(startup_s, byte_s)


def end_s(
    buckets: Sequence[Sequence[int]],
    sizes: Sequence[int],
    ready_s: Sequence[float],
    cost: AllReduceCost,
) -> float:
    """Return when the last of BUCKETS has been reduced.

    SIZES are bytes, READY_S the seconds after which each gradient is ready.

    >>> end_s([[0], [1, 2]], [10, 10, 10], [1.0, 2.0, 3.0], AllReduceCost(0.5, 0.1))
    5.5
    """
    end = 0.0
    for bucket in buckets:
        ready = max(ready_s[index] for index in bucket)
        end = max(end, ready) + cost.of(sum(sizes[index] for index in bucket))
    return end


def plan(
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    ready_s: Sequence[float],
    cost: AllReduceCost,
    *,
    limit_count: int | None = None,
) -> list[list[int]]:
    """Return the indexes of each bucket, so that the last allreduce ends as early as possible.

    SIZES are bytes, in the order in which gradients are reduced; a bucket has neighbours of one
    kind (dtype) only, at most LIMIT_COUNT. No two buckets could be merged without a later end.

    >>> plan([10, 10, 10], "aaa", [1.0, 2.0, 9.0], AllReduceCost(0.5, 0.1))
    [[0, 1], [2]]
    """
    # The earliest end of the first gradients, and where their last bucket begins. Ending them as
    # early as possible is best for the later ones, too.
    best, begins = [0.0], [0]
    ready = 0.0
    for end in range(1, len(sizes) + 1):
        ready = max(ready, ready_s[end - 1])
        earliest = float("inf")
        earliest_begin = nbytes = 0
        for begin in range(end - 1, -1, -1):
            if kinds[begin] != kinds[end - 1] or (limit_count and end - begin > limit_count):
                break
            nbytes += sizes[begin]
            candidate = max(best[begin], ready) + cost.of(nbytes)
            if candidate < earliest:
                earliest, earliest_begin = candidate, begin
            if best[begin] <= ready:
                # The channel is free by then: a longer bucket begins no sooner.
                break
        best.append(earliest)
        begins.append(earliest_begin)
    planned: list[list[int]] = []
    end = len(sizes)
    while end:
        planned.append(list(range(begins[end], end)))
        end = begins[end]

    def may_join(bucket: list[int]) -> bool:
        is_short = limit_count is None or len(bucket) <= limit_count
        return is_short and len({kinds[index] for index in bucket}) == 1

    return _merged(planned[::-1], may_join, lambda buckets: end_s(buckets, sizes, ready_s, cost))


def _merged(
    buckets: list[list[int]],
    may_join: Callable[[list[int]], bool],
    end: Callable[[list[list[int]]], float],
) -> list[list[int]]:
    """Merge neighbours of BUCKETS if the end is no later: each startup costs CPU time."""
    soonest = end(buckets)
    place = 0
    while place + 1 < len(buckets):
        together = [*buckets[place], *buckets[place + 1]]
        merged = [*buckets[:place], together, *buckets[place + 2 :]]
        if may_join(together) and end(merged) <= soonest:
            buckets = merged
        else:
            place += 1
    return buckets
