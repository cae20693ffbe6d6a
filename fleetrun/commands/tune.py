"""`fleetrun tune`: measures values of a strategy's fields in turns, and ranks them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from fleetrun.cli import parser, types
from fleetrun.cli.options import FIELD
from fleetrun.commands import tables, trials
from fleetrun.commands.trials import TrialOutcome
from fleetrun.errors import UsageError
from fleetrun.printing import put, remark, say
from fleetrun.rundir import names, secrets
from fleetrun.rundir.variables import STOP_AFTER
from fleetrun.strategy import load
from fleetrun.text import counted

RESULTS = "tune.json"
# An update of merged gradients is worth several, so the speeds of these cannot be compared.
_MERGE = "gradient_merge"

# The varied fields of a candidate and their values, as text.
Candidate = tuple[tuple[str, str], ...]


class Result(NamedTuple):
    """All runs of a candidate."""

    candidate: Candidate
    trials: tuple[TrialOutcome, ...] = ()

    @property
    def name(self) -> str:
        """The candidate as it would be typed."""
        return " ".join(f"{key}={value}" for key, value in self.candidate)

    @property
    def fault(self) -> str:
        """Why it does not work; empty if it does."""
        return next((trial.fault for trial in self.trials if trial.fault), "")

    @property
    def speed(self) -> float:
        """The median of its runs in steps a second."""
        return 0.0 if self.fault else median(trial.speeds[0] for trial in self.trials)

    @property
    def speeds(self) -> list[float]:
        """The speeds of its runs and of the halves of each: the range within which it varies."""
        return [speed for trial in self.trials for speed in trial.speeds]

    @property
    def idle(self) -> dict[str, str]:
        """The status of each varied field that changes nothing."""
        known = {key: self.trials[0].idle(key) for key, _ in self.candidate if self.trials}
        return {key: status for key, status in known.items() if status}

    def is_alike(self, other: Result) -> bool:
        """Whether no difference to OTHER was measured, or none is possible."""
        differing = dict(set(self.candidate) ^ set(other.candidate)).keys()
        is_equal = differing <= self.idle.keys() & other.idle.keys()
        return is_equal or trials.overlap(self.speeds, other.speeds)


def grid(varied: Iterable[str]) -> list[Candidate]:
    """Return every combination of the values in texts such as `a=1,2`.

    >>> grid(["amp=1,0", "nccl_comm_num=2"])
    [(('amp', '1'), ('nccl_comm_num', '2')), (('amp', '0'), ('nccl_comm_num', '2'))]
    """
    axes: dict[str, list[tuple[str, str]]] = {}
    for text in varied:
        key, equals, listed = text.partition("=")
        key = key.strip()
        values = list(dict.fromkeys(part.strip() for part in listed.split(",")))
        if not key or not equals or not all(values):
            raise UsageError(f"--vary={text}: give a field and values, as in nccl_comm_num=1,2.")
        if key in axes:
            raise UsageError(f"--vary={text}: {key} is varied twice.")
        if key.startswith(_MERGE):
            raise UsageError(
                f"--vary={text}: it changes how many batches an update has, and so the results; "
                "give it to the launch instead."
            )
        axes[key] = [(key, value) for value in values]
        for value in values:
            load.parse_set(f"{key}={value}")
    if not axes:
        raise UsageError("nothing to tune: give --vary, as in --vary nccl_comm_num=1,2.")
    return list(itertools.product(*axes.values()))


def _train(
    candidate: Candidate, launch: parser.Launch, folder: Path, own: Mapping[str, Any]
) -> TrialOutcome:
    """Launch CANDIDATE in FOLDER with the options OWN, and return what it has shown."""
    words = [*launch.words, *(f"--set={key}={value}" for key, value in candidate)]
    environ = {STOP_AFTER: str(own["steps"])}
    code = trials.launch(words, launch.script, environ, folder, own["timeout"])
    run_dir = folder / "log" / names.LATEST
    shown = trials.outcome(code, folder, run_dir, own["timeout"], own["warmup"])
    if shown.fault or shown.speeds:
        return shown
    fault = f"it succeeded after {counted(shown.updates, 'update')}, too few to time"
    return shown._replace(fault=fault)


def ranked(done: Iterable[tuple[Candidate, Sequence[TrialOutcome]]]) -> list[Result]:
    """Return the results of the trials DONE, the fastest first, failed ones last."""
    results = [Result(candidate, tuple(several)) for candidate, several in done]
    return sorted(results, key=lambda result: (bool(result.fault), -result.speed))


def leaders(results: Sequence[Result]) -> list[Result]:
    """Return the first result that works, and those that no measurement tells from it."""
    working = [result for result in results if not result.fault]
    return [result for result in working if result.is_alike(working[0])]


def text(results: Sequence[Result]) -> str:
    """Return the ranking, draws in the first place, and which candidate is the fastest."""
    rows: list[tuple[str, ...]] = []
    first = leaders(results)
    for place, result in enumerate(results, 1):
        if result.fault:
            rows.append(("-", "failed", "", "", f"{result.name}: {result.fault}"))
            continue
        between = f"{min(result.speeds):.2f}-{max(result.speeds):.2f}"
        peak = f"{max(trial.peak_bytes for trial in result.trials) / 2**20:.0f} MiB"
        number = "1" if result in first else str(place)
        rows.append((number, f"{result.speed:.2f}", between, peak, result.name))
        rows += [("", "", "", "", f"  {key}: {status}") for key, status in result.idle.items()]
    heads = ("", "steps/s", "between", "peak", "candidate")
    table = tables.layout(rows, heads=heads, numbers=4, width=tables.width())
    if not first:
        return f"{table}\nNo candidate works, so there is nothing to choose."
    if len(first) == 1:
        words = " ".join(f"--set {key}={value}" for key, value in first[0].candidate)
        return f"{table}\nFastest: {first[0].name}. Add {words} to your launch."
    listed = "; ".join(result.name for result in first)
    return (
        f"{table}\nNo difference measured: {listed}. Give more --steps and --repeats, "
        "or choose by another measure."
    )


def document(launch: parser.Launch, results: Sequence[Result]) -> str:
    """Return RESULTS of tuning LAUNCH as JSON."""
    first = leaders(results)
    content = {
        "schema": 3,
        "launch": secrets.conceal([*launch.words, *launch.script]),
        "best": dict(first[0].candidate) if len(first) == 1 else None,
        "draw": [dict(result.candidate) for result in first] if len(first) > 1 else [],
        "candidates": [
            {
                "values": dict(result.candidate),
                "steps_per_s": result.speed or None,
                "between": [min(result.speeds), max(result.speeds)] if result.speeds else None,
                "peak_bytes": max(trial.peak_bytes for trial in result.trials) or None,
                "fault": result.fault or None,
                "idle": result.idle,
                "folders": [trial.folder for trial in result.trials],
            }
            for result in results
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def _tune(launch: parser.Launch, **own: Any) -> int:  # noqa: ANN401 - click's
    """Return 0, or 1 if no candidate works; UsageError if it cannot be tuned."""
    for setting in launch.options:
        if setting.name in {"hosts", "hostfile"}:
            raise UsageError(
                f"tune takes no {setting.typed}: it launches on this host; start the job on "
                "several hosts with each strategy, and compare them with `fleetrun report`."
            )
    fewest = own["warmup"] + trials.FEWEST_TIMED
    if own["steps"] < fewest:
        raise UsageError(
            f"--steps={own['steps']} leaves too few updates after --warmup={own['warmup']}: "
            f"give at least {fewest}."
        )
    log = remark if own["json"] else say
    done: dict[Candidate, list[TrialOutcome]] = {candidate: [] for candidate in grid(own["vary"])}
    trials.check(launch, "tune --vary nccl_comm_num=1,2")
    with trials.held_folder(own["out"]):
        log(f"{len(done)} candidates; everything is kept in {own['out']}")
        for repeat in range(own["repeats"]):
            for place, (candidate, several) in enumerate(done.items()):
                if any(trial.fault for trial in several):
                    continue
                folder = trials.new_folder(own["out"], "trials", f"{place:03}-{repeat}")
                several.append(trial := _train(candidate, launch, folder, own))
                shown = trial.fault or f"{trial.speeds[0]:.2f} steps/s"
                log(f"  {Result(candidate).name}: {shown}")
        results = ranked(done.items())
        results_text = document(launch, results)
        Path(own["out"], RESULTS).write_text(results_text, encoding="utf-8")
    if own["json"]:
        put(results_text)
    else:
        say(text(results))
    return 0 if leaders(results) else 1


command = parser.LaunchCommand(
    "tune",
    help="Train a few steps with every combination of the values, in turns, and rank them. The "
    "script runs unmodified, with the launch options and one --set KEY=VALUE for each --vary.",
    options_metavar="--vary KEY=A,B,... [--vary ...] [OPTIONS] [LAUNCH OPTIONS] "
    "SCRIPT [ARGUMENTS]...",
    callback=click.pass_obj(_tune),
    params=[
        parser.option("vary", FIELD, "A field and values (repeatable).", metavar="KEY=A,B,..."),
        parser.option("steps", types.number(2), "Updates of a run.", default="30"),
        parser.option("warmup", types.number(0), "First updates, not timed.", default="5"),
        parser.option("repeats", types.number(1), "Runs of each, in turns.", default="2"),
        trials.TIMEOUT,
        parser.option("out", types.FOLDER, "Output: tune.json, trials/.", default="tune"),
        parser.option("json", types.FLAG, "Print tune.json, and all else on standard error."),
    ],
)
