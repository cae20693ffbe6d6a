"""Successive halving: all candidates run briefly, the better half longer, the last in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import median
from typing import NamedTuple

from fleetrun.commands import trials
from fleetrun.commands.tune.candidates import Candidate, TuneSpec
from fleetrun.rundir import names
from fleetrun.rundir.strategyfiles import NO_DIFFERENCE
from fleetrun.rundir.variables import STOP_AFTER

# Fewer candidates are not halved.
_FINALISTS = 2
# Sums in another order differ by this share; runs may differ by this multiple of their noise.
_SAME_LOSS = 1e-3
_NOISE = 3.0


class Trial(NamedTuple):
    """One run of a candidate; `fault` says why it does not count."""

    # Updates a second of the whole run, and of its halves.
    speeds: tuple[float, ...] = ()
    loss: float | None = None
    peak_bytes: int | None = None
    fault: str = ""
    # Micro-steps in an update, where gradients were seen to be merged.
    merged: int = 1
    # Varied fields that change nothing, each with a sentence about it.
    idle: tuple[tuple[str, str], ...] = ()
    folder: str = ""

    @property
    def steps_per_s(self) -> tuple[float, ...]:
        """Micro-steps a second: an update of merged gradients is worth several."""
        return tuple(speed * self.merged for speed in self.speeds)


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
        return 0.0 if self.fault else median(trial.steps_per_s[0] for trial in self.trials)

    @property
    def speeds(self) -> list[float]:
        """The speeds of its runs and of the halves of each: the range within which it varies."""
        return [speed for trial in self.trials for speed in trial.steps_per_s]

    @property
    def spread(self) -> float:
        """The spread of its runs, as a share of the median."""
        if self.fault:
            return 0.0
        whole = [trial.steps_per_s[0] for trial in self.trials]
        return (max(whole) - min(whole)) / self.speed

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory of a rank in any run."""
        return max((trial.peak_bytes for trial in self.trials if trial.peak_bytes), default=None)

    def equals(self, other: Result) -> bool:
        """Whether the fields in which it differs from OTHER change nothing in any run of both."""
        differing = dict(set(self.candidate.values) ^ set(other.candidate.values)).keys()
        return all(differing <= dict(trial.idle).keys() for trial in (*self.trials, *other.trials))


def launch(spec: TuneSpec, candidate: Candidate, steps: int, name: str) -> Trial:
    """Launch CANDIDATE in the folder NAME for STEPS updates."""
    folder = trials.new_folder(spec.out, "trials", name)
    words = [*spec.launch, *(f"--set={key}={value}" for key, value in candidate.values)]
    environ = {STOP_AFTER: str(steps)}
    code = trials.launch(words, spec.script, environ, folder, spec.timeout_s)
    seen = trials.outcome(code, folder, folder / "log" / names.LATEST, spec.timeout_s)
    timed = sorted(seen.at)[spec.warmup :]
    speeds = trials.speeds(seen.at, timed)
    if seen.fault or not speeds:
        return Trial(fault=seen.fault or trials.too_short(seen.at), folder=str(folder))
    idle = []
    for key, _ in candidate.values:
        verdict = trials.idle(key, seen.verdicts)
        if verdict is not None:
            why = f" ({verdict.why})" if verdict.why else ""
            is_moot = verdict.status == NO_DIFFERENCE
            how = "makes no difference" if is_moot else f"is not in effect: {verdict.status}"
            idle.append((key, f"{key} {how}{why}"))
    return Trial(
        speeds,
        # After as many updates as the other candidates.
        loss=seen.losses.get(0, {}).get(timed[-1]),
        peak_bytes=seen.peak_bytes,
        merged=trials.merged(seen.verdicts),
        idle=tuple(idle),
        folder=str(folder),
    )


def rounds(count: int, steps: int, warmup: int) -> list[int]:
    """Return the number of updates of each round for COUNT candidates; it doubles each time.

    >>> rounds(8, steps=40, warmup=5), rounds(2, steps=40, warmup=5)
    ([10, 20, 40], [40])
    """
    lengths = [steps]
    while count > _FINALISTS:
        count = (count + 1) // 2
        lengths.insert(0, max(lengths[0] // 2, warmup + trials.FEWEST_TIMED))
    return lengths


def run(
    spec: TuneSpec, trial: Callable[[Candidate, int, str], Trial], log: Callable[[str], object]
) -> list[Result]:
    """Halve the candidates round by round; TRIAL runs one for a number of updates. Best first."""
    places = {candidate: place for place, candidate in enumerate(spec.candidates)}
    results: dict[Candidate, Result] = {}
    strange: dict[Candidate, str] = {}
    left = list(spec.candidates)
    for number, steps in enumerate(rounds(len(left), spec.steps, spec.warmup), 1):
        log(f"Round {number}: {len(left)} candidates, {steps} updates")
        runs: dict[Candidate, list[Trial]] = {candidate: [] for candidate in left}
        for repeat in range(spec.repeats):
            for candidate in left:
                if any(earlier.fault for earlier in runs[candidate]):
                    continue
                name = f"{number}-{places[candidate]:03}-{repeat}"
                done = trial(candidate, steps, name)
                runs[candidate].append(done)
                log(f"  {candidate}: {done.fault or f'{done.steps_per_s[0]:.2f} steps/s'}")
        of_round = [Result(candidate, number, steps, tuple(runs[candidate])) for candidate in left]
        results |= {result.candidate: result for result in of_round}
        working = [result for result in of_round if not result.fault]
        # Other numbers of updates give other losses, so only those of one round are compared; who
        # has differed once is no reference later.
        strange |= _strange([result for result in working if result.candidate not in strange])
        left = [result.candidate for result in sorted(working, key=lambda result: -result.speed)]
        if len(left) > _FINALISTS:
            left = left[: (len(left) + 1) // 2]
        if not left:
            break
    return [
        result._replace(remarks=tuple(_remarks(result, strange)))
        for result in sorted(
            results.values(), key=lambda result: (bool(result.fault), -result.round, -result.speed)
        )
    ]


def _remarks(result: Result, strange: dict[Candidate, str]) -> list[str]:
    """Return what is to be said of RESULT: fields without effect, and a STRANGE loss."""
    idle = dict.fromkeys(text for trial in result.trials for _, text in trial.idle)
    return [*idle, *filter(None, [strange.get(result.candidate, "")])]


def _strange(results: Sequence[Result]) -> dict[Candidate, str]:
    """Return a sentence for each of RESULTS whose loss is not that of most which compute alike."""
    groups: dict[object, dict[Candidate, list[float]]] = {}
    sentences: dict[Candidate, str] = {}
    for result in results:
        losses = [trial.loss for trial in result.trials if trial.loss is not None]
        if losses and not isfinite(median(losses)):
            sentences[result.candidate] = f"its loss is {median(losses):g}"
        elif losses:
            values = result.candidate.values
            meaning = tuple(pair for pair in values if pair[0].startswith(trials.MEANINGFUL))
            groups.setdefault(meaning, {})[result.candidate] = losses
    for group in groups.values():
        noise = max(max(losses) - min(losses) for losses in group.values())
        loss_of = {candidate: median(losses) for candidate, losses in group.items()}
        for candidate, loss in loss_of.items():
            most = max(_like(other, loss_of, noise) for other in loss_of.values())
            alike = _like(loss, loss_of, noise)
            # Where no loss is that of most, none of them is known to be right.
            is_usual = (
                alike == most
                and sum(_like(other, loss_of, noise) == most for other in loss_of.values()) == most
            )
            if not is_usual:
                others = [f"{loss_of[other]:.6g}" for other in loss_of if other != candidate]
                sentences[candidate] = (
                    f"its loss is {loss:.6g}, of the others {', '.join(others)}: "
                    "they do not compute the same"
                )
    return sentences


def _like(loss: float, losses: dict[Candidate, float], noise: float) -> int:
    """Return how many of LOSSES equal LOSS but for rounding and NOISE."""
    return sum(
        abs(loss - other) <= max(_SAME_LOSS * max(abs(loss), abs(other)), _NOISE * noise)
        for other in losses.values()
    )
