"""Successive halving: all candidates run briefly, the better half longer, the last in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import median
from typing import NamedTuple

from fleetrun.commands.tune.candidates import FEWEST_TIMED, Candidate, TuneSpec

# Fewer candidates are not halved.
_FINALISTS = 2
# A field whose name begins so changes what is computed, not only how.
MEANINGFUL = (
    "gradient_merge",
    "amp",
    "fp16_allreduce",
    "bf16_allreduce",
    "dgc",
    "lars",
    "lamb",
    "localsgd",
    "adaptive_localsgd",
    "sync_batch_norm",
    "asp",
)
# Sums in another order differ by this share; runs may differ by this multiple of their noise.
_SAME_LOSS = 1e-3
_NOISE = 3.0
_ONE_IS_WRONG = "the two do not compute the same"
_UNKNOWN = "which is right is unknown"


class Trial(NamedTuple):
    """One run of a candidate; `fault` says why it does not count."""

    updates_per_s: float = 0.0
    loss: float | None = None
    # The peak of the rank that held most.
    peak_bytes: int | None = None
    fault: str = ""
    # Micro-steps in an update, where gradients were seen to be merged.
    merged: int = 1
    # Varied fields that change nothing, each with a sentence about it.
    idle: tuple[tuple[str, str], ...] = ()
    folder: str = ""
    # Of each half of the timed updates, in updates a second.
    speeds: tuple[float, ...] = ()

    @property
    def speed(self) -> float:
        """Micro-steps a second: an update of merged gradients is worth several."""
        return self.updates_per_s * self.merged


class Result(NamedTuple):
    """The result of a candidate in its last round, and its trials there."""

    candidate: Candidate
    round: int
    steps: int
    trials: tuple[Trial, ...]
    remarks: tuple[str, ...] = ()

    @property
    def fault(self) -> str:
        """Why it cannot be chosen."""
        return next((trial.fault for trial in self.trials if trial.fault), "")

    @property
    def speed(self) -> float:
        """The median of its runs; none if one of them failed."""
        return 0.0 if self.fault else median(trial.speed for trial in self.trials)

    @property
    def spread(self) -> float:
        """The spread of its runs, as a share of the median."""
        if self.fault or not self.speed:
            return 0.0
        speeds = [trial.speed for trial in self.trials]
        return (max(speeds) - min(speeds)) / self.speed

    @property
    def speeds(self) -> list[float]:
        """The speeds of its runs and of the halves of each: the range within which it varies."""
        return [
            speed * trial.merged
            for trial in self.trials
            for speed in (trial.updates_per_s, *trial.speeds)
        ]

    def equals(self, other: Result) -> bool:
        """Whether the fields in which it differs from OTHER change nothing in any run of both."""
        differing = dict(set(self.candidate.values) ^ set(other.candidate.values)).keys()
        runs = [dict(trial.idle).keys() for trial in (*self.trials, *other.trials)]
        return all(differing <= idle for idle in runs)

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory of a rank in any run."""
        return max((trial.peak_bytes for trial in self.trials if trial.peak_bytes), default=None)


def rounds(count: int, steps: int, warmup: int) -> list[int]:
    """Return the number of updates of each round for COUNT candidates; it doubles each time.

    >>> rounds(8, steps=40, warmup=5), rounds(2, steps=40, warmup=5)
    ([10, 20, 40], [40])
    """
    lengths = [steps]
    while count > _FINALISTS:
        count = (count + 1) // 2
        lengths.insert(0, max(lengths[0] // 2, warmup + FEWEST_TIMED))
    return lengths


def run(
    spec: TuneSpec, trial: Callable[[Candidate, int, str], Trial], log: Callable[[str], object]
) -> list[Result]:
    """Halve the candidates round by round; TRIAL runs one for a number of updates. Best first."""
    places = {candidate: place for place, candidate in enumerate(spec.candidates)}
    results: dict[Candidate, Result] = {}
    rounds_run: list[list[Result]] = []
    left = list(spec.candidates)
    for number, steps in enumerate(rounds(len(left), spec.steps, spec.warmup), 1):
        log(f"Round {number}: {len(left)} candidates, {steps} updates")
        trials: dict[Candidate, list[Trial]] = {candidate: [] for candidate in left}
        # In turns, so that a slower machine affects all candidates equally.
        for repeat in range(spec.repeats):
            for candidate in left:
                if any(result.fault for result in trials[candidate]):
                    continue
                name = f"{number}-{places[candidate]:03}-{repeat}"
                done = trial(candidate, steps, name)
                trials[candidate].append(done)
                log(f"  {candidate}: {done.fault or f'{done.speed:.2f} steps/s'}")
        for candidate, runs in trials.items():
            results[candidate] = Result(candidate, number, steps, tuple(runs))
        rounds_run.append([results[candidate] for candidate in trials])
        left = sorted(
            (result for result in left if not results[result].fault),
            key=lambda result: -results[result].speed,
        )
        if len(left) > _FINALISTS:
            left = left[: (len(left) + 1) // 2]
        if not left:
            break
    ranked = sorted(
        results.values(), key=lambda result: (bool(result.fault), -result.round, -result.speed)
    )
    return with_remarks(ranked, rounds_run)


def with_remarks(ranked: Sequence[Result], rounds_run: Sequence[Sequence[Result]]) -> list[Result]:
    """Add remarks about fields without effect, and about losses unlike those of equal candidates.

    Losses are compared within each of ROUNDS_RUN, as other numbers of updates give other losses.
    """
    strange: dict[Candidate, str] = {}
    for results in rounds_run:
        groups: dict[object, list[Result]] = {}
        for result in results:
            # A candidate that has differed once is not a reference later.
            if not result.fault and result.candidate not in strange:
                meaning = tuple(v for v in result.candidate.values if v[0].startswith(MEANINGFUL))
                groups.setdefault(meaning, []).append(result)
        for group in groups.values():
            strange |= _strange(group)
    remarked = []
    for result in ranked:
        remarks = list(dict.fromkeys(text for trial in result.trials for _, text in trial.idle))
        remarks += [strange[result.candidate]] if result.candidate in strange else []
        remarked.append(result._replace(remarks=tuple(remarks)))
    return remarked


def _strange(group: Sequence[Result]) -> dict[Candidate, str]:
    """Return a sentence for each of GROUP whose loss differs from the others'."""
    losses_of = {
        result.candidate: [trial.loss for trial in result.trials if trial.loss is not None]
        for result in group
    }
    losses = {candidate: median(several) for candidate, several in losses_of.items() if several}
    # A diverged training cannot be compared.
    remarks = {
        candidate: f"its loss is {loss:g}"
        for candidate, loss in losses.items()
        if not isfinite(loss)
    }
    losses = {candidate: loss for candidate, loss in losses.items() if candidate not in remarks}
    if len(losses) < _FINALISTS:
        return remarks
    noise = max(max(losses_of[candidate]) - min(losses_of[candidate]) for candidate in losses)

    def agree(first: float, second: float) -> bool:
        rounding = _SAME_LOSS * max(abs(first), abs(second))
        return abs(first - second) <= max(rounding, _NOISE * noise)

    # Not the median, which may be the loss of no candidate or of any.
    like = {
        candidate: [peer for peer in losses if agree(loss, losses[peer])]
        for candidate, loss in losses.items()
    }
    usual = max(like, key=lambda candidate: len(like[candidate]))
    odd = [candidate for candidate in losses if candidate not in like[usual]]
    if len(like[usual]) > max((len(like[candidate]) for candidate in odd), default=0):
        common = f"that of {len(like[usual])} others {losses[usual]:.6g}"
        return remarks | {
            candidate: f"its loss is {losses[candidate]:.6g}, {common}" for candidate in odd
        }
    for candidate, loss in losses.items():
        peers = [peer for peer in losses if peer != candidate]
        listed = ", ".join(f"{losses[peer]:.6g}" for peer in peers)
        remarks[candidate] = (
            f"its loss is {loss:.6g}, that of {peers[0]} is {listed}: {_ONE_IS_WRONG}"
            if len(peers) == 1
            else f"its loss is {loss:.6g}, those of the others {listed}: {_UNKNOWN}"
        )
    return remarks
