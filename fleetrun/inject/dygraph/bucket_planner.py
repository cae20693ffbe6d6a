"""Plans the buckets of a model from its first backwards: `fuse_grad_size_in_MB: plan`.

After a few backwards the planner knows when each gradient is ready, measures the cost of an
allreduce, and plans twice: with that cost, and with a smaller startup, since an allreduce that
follows another costs less than one alone. The plans, the buckets of `auto` and a single bucket are
tried in turns of a few backwards each, and the fastest is kept. All ranks decide by the same sums
over the ranks, so they agree.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import communicators
from ..bucket_plan import AllReduceCost, end_s, fit, plan
from ..evidence import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..communicators import Communicator

# Backwards that are skipped while memory and order settle, and those that are timed.
_SETTLING, _WATCHED = 2, 5
# The backwards in one turn of a candidate, how many of them do not count because buckets get new
# memory, and the turns of each candidate.
_TRIED, _UNCOUNTED, _ROUNDS = 5, 1, 2
# The least share of the startup that an allreduce costs if it follows another: what it sends first
# overlaps with what the previous one sends last. At 100 Mbit/s, 12 buckets ended 2 to 3 % sooner
# than the 2 buckets that the full startup led to.
_FOLLOWING = 0.125
# The sizes of the measured allreduces, in bytes, and the repetitions of each.
_PROBED, _PROBES = (4 << 10, 256 << 10, 1 << 20), 4
_MICRO = 1e6


class PlanOutcome(NamedTuple):
    """The result of planning: `chosen` is plan, auto or one; times are seconds per backward.

    `bytes_chosen` has the size of each chosen bucket, `planned` is the number of planned ones.
    """

    chosen: str
    planned: int
    bytes_chosen: tuple[int, ...]
    predicted_s: float
    # By the name of each candidate.
    seen_s: dict[str, float]
    cost: AllReduceCost

    def describe(self) -> str:
        """Describe what was predicted and measured.

        >>> cost = AllReduceCost(0.0001, 1e-9)
        >>> PlanOutcome("plan", 1, (9,), 0.02, {"auto": 0.024, "plan": 0.021}, cost).describe()
        'planned 1 bucket: 20 ms predicted, 21 ms seen (auto: 24 ms); an allreduce costs 0.1 ms \
and 1 ms per MB'
        """
        alternatives = ", ".join(
            f"{_WORDS[name]}: {seconds * 1e3:.3g} ms"
            for name, seconds in self.seen_s.items()
            if name != "plan"
        )
        seen = f", {self.seen_s['plan'] * 1e3:.3g} ms seen" if "plan" in self.seen_s else ""
        return (
            f"planned {plural(self.planned, 'bucket')}:"
            f" {self.predicted_s * 1e3:.3g} ms predicted{seen}"
            f"{f' ({alternatives})' if alternatives else ''};"
            f" an allreduce costs {self.cost.startup_s * 1e3:.3g} ms"
            f" and {self.cost.byte_s * 1e9:.3g} ms per MB"
        )


# The plan with the smaller startup; the faster of the two becomes the plan.
_FINER = "finer"
_WORDS = {"auto": "auto", "one": "all in one", "plan": "plan"}


class BucketPlanner:
    """Watches the backwards of one model and chooses the buckets of the next ones.

    SUM_INTEGERS sums over all ranks. MEASURE takes a limit in bytes and returns (bytes,
    microseconds) of allreduces. ON_DECIDED is called once. CLOCK returns seconds.
    """

    def __init__(
        self,
        sum_integers: Callable[[Sequence[int]], list[int]],
        nranks: int,
        on_decided: Callable[[BucketPlanner], None],
        measure: Callable[[int], list[tuple[int, int]]],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sum_integers = sum_integers
        self._nranks = nranks
        self._on_decided = on_decided
        self._probe = measure
        self._clock = clock
        # Until it has decided.
        self.is_on = True
        # Why there is no plan.
        self.failure = ""
        self.outcome: PlanOutcome | None = None
        self._began_s: float | None = None
        self._backwards = 0
        # For each watched backward: the seconds from its start to each gradient.
        self._ready_s: list[list[float]] = []
        self._misses = False
        self._candidates: dict[str, list[list[int]]] = {}
        # The current candidate and those to come, and the backwards done in the current turn.
        self._turns: list[str] = []
        self._done = 0
        self._seen_s: dict[str, list[float]] = {}
        self._predicted_s = self._finer_s = 0.0
        self._sizes: list[int] = []
        self._cost = AllReduceCost(0.0, 0.0)

    def begin(self) -> None:
        """Record that a backward begins."""
        self._began_s = self._clock()

    def give_up(self, why: str) -> None:
        """Make no plan, or drop it; every rank must call this."""
        if self.is_on:
            self.is_on = False
            self.failure = why
            self._on_decided(self)

    def finish(
        self,
        ready_at: Sequence[float | None],
        sizes: Sequence[int],
        kinds: Sequence[Any],
        current: list[list[int]],
        limit_count: int | None,
    ) -> list[list[int]] | None:
        """Record a backward that was reduced; return new buckets for the next ones, or None.

        READY_AT is when each gradient was ready (None: it never was), SIZES are their bytes and
        KINDS their dtypes. The buckets CURRENT hold indexes of these sequences.
        """
        began_s, self._began_s = self._began_s, None
        if began_s is None:
            # A partial round of merged gradients, which no backward has begun.
            return None
        if self._turns:
            return self._try(self._clock() - began_s)
        self._backwards += 1
        if self._backwards <= _SETTLING:
            return None
        self._misses |= None in ready_at
        self._ready_s.append([(at or began_s) - began_s for at in ready_at])
        if len(self._ready_s) < _WATCHED:
            return None
        middle = _WATCHED // 2
        ready_us = [round(sorted(times)[middle] * _MICRO) for times in zip(*self._ready_s)]
        misses, *sums = self._sum_integers([int(self._misses), *ready_us])
        if misses:
            self.give_up("not every backward computes all gradients")
            return None
        ready_s = [total / self._nranks / _MICRO for total in sums]
        self._cost = fit(self._mean(self._probe(sum(sizes))))
        planned = plan(sizes, kinds, ready_s, self._cost, limit_count=limit_count)
        self._sizes = list(sizes)
        self._predicted_s = end_s(planned, sizes, ready_s, self._cost)
        following = AllReduceCost(self._cost.startup_s * _FOLLOWING, self._cost.byte_s)
        finer = plan(sizes, kinds, ready_s, following, limit_count=limit_count)
        self._finer_s = end_s(finer, sizes, ready_s, self._cost)
        self._candidates = {"auto": current, "plan": planned, _FINER: finer}
        if len(set(kinds)) == 1 and limit_count is None:
            self._candidates["one"] = [list(range(len(sizes)))]
        return self._begin_turns()

    def _mean(self, probes_us: list[tuple[int, int]]) -> list[tuple[int, float]]:
        """Return the bytes of each of PROBES_US, and its seconds averaged over the ranks."""
        sums = self._sum_integers([time_us for _, time_us in probes_us])
        return [(size, total / self._nranks / _MICRO) for (size, _), total in zip(probes_us, sums)]

    def _begin_turns(self) -> list[list[int]] | None:
        """Let the candidates that differ take turns; return the first one's buckets."""
        different: list[str] = []
        for name in ("auto", "plan", _FINER, "one"):
            buckets = self._candidates.get(name)
            if buckets and all(buckets != self._candidates[kept] for kept in different):
                different.append(name)
        if len(different) == 1:
            self._decide("auto")
            return None
        self._turns = different * _ROUNDS
        self._seen_s = {name: [] for name in different}
        return self._candidates[self._turns[0]]

    def _try(self, seconds: float) -> list[list[int]] | None:
        """Credit a backward of SECONDS to the current candidate; return the next one's buckets."""
        self._done += 1
        if self._done > _UNCOUNTED:
            self._seen_s[self._turns[0]].append(seconds)
        if self._done < _TRIED:
            return None
        self._done = 0
        tried = self._turns.pop(0)
        if self._turns:
            return self._candidates[self._turns[0]]
        medians = [
            round(sorted(times)[len(times) // 2] * _MICRO) for times in self._seen_s.values()
        ]
        sums = self._sum_integers(medians)
        seen = {name: total / self._nranks / _MICRO for name, total in zip(self._seen_s, sums)}
        in_use = self._candidates[tried]
        self._keep_faster_plan(seen)
        self._seen_s = {name: [seconds] for name, seconds in seen.items()}
        # The default comes first, so that an equal time does not replace it.
        best = min(seen, key=lambda name: seen[name])
        self._decide(best)
        return None if self._candidates[best] == in_use else self._candidates[best]

    def _keep_faster_plan(self, seen_s: dict[str, float]) -> None:
        """Replace the plan by the finer one if that was faster, by the times SEEN_S."""
        finer_s = seen_s.pop(_FINER, None)
        plan_s = next(
            seconds
            for name, seconds in seen_s.items()
            if self._candidates[name] == self._candidates["plan"]
        )
        if finer_s is not None and finer_s < plan_s:
            seen_s["plan"], self._predicted_s = finer_s, self._finer_s
            self._candidates["plan"] = self._candidates[_FINER]

    def _decide(self, chosen: str) -> None:
        self.is_on = False
        seen = {name: times[0] for name, times in self._seen_s.items()}
        if chosen == "auto" and self._candidates["plan"] == self._candidates["auto"]:
            chosen = "plan"
        if "plan" not in seen and seen:
            # It is the same as another candidate.
            same = next(name for name in seen if self._candidates[name] == self._candidates["plan"])
            seen["plan"] = seen.pop(same)
            chosen = "plan" if chosen == same else chosen
        self.outcome = PlanOutcome(
            chosen,
            len(self._candidates["plan"]),
            tuple(
                sum(self._sizes[index] for index in bucket) for bucket in self._candidates[chosen]
            ),
            self._predicted_s,
            seen,
            self._cost,
        )
        self._on_decided(self)


def probe(communicator: Communicator, most: int) -> list[tuple[int, int]]:
    """Return (bytes, microseconds on this rank) of allreduces of several sizes.

    All but the smallest have at most MOST bytes. Every rank must call this.
    """
    import paddle

    sizes = [size for size in _PROBED if size <= most] or [_PROBED[0]]
    results = []
    with paddle.no_grad():
        for size in sizes:
            tensor = communicator.zeros(size)
            times = []
            for _ in range(_PROBES):
                # All ranks begin at once.
                communicator.sum_integers([0])
                began_s = time.perf_counter()
                communicators.sum_uncounted([communicator], [tensor])
                times.append(time.perf_counter() - began_s)
            results.append((size, round(sorted(times)[_PROBES // 2] * _MICRO)))
    return results
