"""`fleetrun tune`: measures values of a strategy's fields in turns, and ranks them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import yaml

from fleetrun.cli import parser, types
from fleetrun.cli.options import FieldValues
from fleetrun.commands import tables, trials
from fleetrun.errors import UsageError
from fleetrun.host import probe
from fleetrun.printing import put, say, tell
from fleetrun.rundir import names, secrets
from fleetrun.rundir.strategyfiles import NO_DIFFERENCE
from fleetrun.rundir.variables import STOP_AFTER
from fleetrun.strategy import load
from fleetrun.text import counted

BEST, RESULTS = "best.yaml", "tune.json"


class Candidate(NamedTuple):
    """One combination: the varied fields and their values, as text."""

    values: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """As it would be typed."""
        return " ".join(f"{key}={value}" for key, value in self.values)


class Trial(NamedTuple):
    """One run of a candidate; `fault` says why it does not count."""

    # Backward passes a second, of the whole run and of its halves: an update of merged gradients
    # is worth several.
    steps_per_s: tuple[float, ...] = ()
    loss: float | None = None
    peak_bytes: int = 0
    fault: str = ""
    # A sentence about each varied field that changes nothing, and about a loss that is no number.
    remarks: Mapping[str, str] = {}
    folder: str = ""


class Result(NamedTuple):
    """All runs of a candidate."""

    candidate: Candidate
    trials: tuple[Trial, ...]
    remarks: tuple[str, ...] = ()

    @property
    def fault(self) -> str:
        """Why it does not work; empty if it does."""
        return next((trial.fault for trial in self.trials if trial.fault), "")

    @property
    def speed(self) -> float:
        """The median of its runs in steps a second."""
        return 0.0 if self.fault else median(trial.steps_per_s[0] for trial in self.trials)

    @property
    def speeds(self) -> list[float]:
        """The speeds of its runs and of the halves of each: the range within which it varies."""
        return [speed for trial in self.trials for speed in trial.steps_per_s]

    def is_alike(self, other: Result) -> bool:
        """Whether no difference to OTHER was measured, or none is possible."""
        differing = dict(set(self.candidate.values) ^ set(other.candidate.values)).keys()
        is_equal = all(differing <= trial.remarks.keys() for trial in (*self.trials, *other.trials))
        return is_equal or trials.overlap(self.speeds, other.speeds)


# -- candidates ------------------------------------------------------------------------------------


def grid(varied: Iterable[str]) -> tuple[Candidate, ...]:
    """Return every combination of the values in texts such as `a=1,2`.

    >>> [str(candidate) for candidate in grid(["a=1,2", "b=x,y"])]
    ['a=1 b=x', 'a=1 b=y', 'a=2 b=x', 'a=2 b=y']
    """
    axes: dict[str, list[tuple[str, str]]] = {}
    for text in varied:
        key, equals, listed = text.partition("=")
        key = key.strip()
        values = list(dict.fromkeys(part.strip() for part in listed.split(",")))
        if not key or not equals or not all(values):
            raise UsageError(
                f"--vary={text}: give a field and its values, as in nccl_comm_num=1,2."
            )
        if key in axes:
            raise UsageError(f"--vary={text}: {key} is varied twice.")
        axes[key] = [(key, value) for value in values]
    if not axes:
        raise UsageError(
            "nothing to tune: give at least one --vary, as in --vary nccl_comm_num=1,2."
        )
    return tuple(Candidate(values) for values in itertools.product(*axes.values()))


# -- runs ------------------------------------------------------------------------------------------


def _train(candidate: Candidate, launch: parser.Launch, folder: Path, own: Any) -> Trial:  # noqa: ANN401 - click's
    """Launch CANDIDATE in FOLDER, and return what it has shown."""
    words = [f"{setting.typed}={setting.raw}" for setting in launch.options]
    words += [f"--set={key}={value}" for key, value in candidate.values]
    environ = {STOP_AFTER: str(own["steps"])}
    code = trials.launch(words, launch.script, environ, folder, own["timeout"])
    shown = trials.outcome(code, folder, folder / "log" / names.LATEST, own["timeout"])
    speeds = shown.speeds(own["warmup"])
    if shown.fault or not speeds:
        return Trial(fault=shown.fault or trials.too_short(shown.at), folder=str(folder))
    remarks = {}
    if shown.loss is not None and not math.isfinite(shown.loss):
        remarks["loss"] = f"its loss is {shown.loss:g}"
    for key, _ in candidate.values:
        verdict = shown.idle(key)
        if verdict is not None:
            is_moot = verdict.status == NO_DIFFERENCE
            how = "makes no difference" if is_moot else f"is not in effect: {verdict.status}"
            remarks[key] = f"{key} {how}" + (f" ({verdict.why})" if verdict.why else "")
    return Trial(
        tuple(speed * shown.micro_steps for speed in speeds),
        loss=shown.loss,
        peak_bytes=shown.peak_bytes or 0,
        remarks=remarks,
        folder=str(folder),
    )


def ranked(done: Mapping[Candidate, Sequence[Trial]]) -> list[Result]:
    """Return the results of the trials DONE with remarks, the fastest first, failed ones last."""
    results = [
        Result(
            candidate,
            tuple(several),
            tuple(dict.fromkeys(text for trial in several for text in trial.remarks.values())),
        )
        for candidate, several in done.items()
    ]
    return sorted(results, key=lambda result: (bool(result.fault), -result.speed))


def leaders(results: Sequence[Result]) -> list[Result]:
    """Return the first result that works, and those that no measurement tells from it."""
    working = [result for result in results if not result.fault]
    return [result for result in working if result.is_alike(working[0])]


# -- what is shown and written ---------------------------------------------------------------------


def table(results: Sequence[Result], width: int = 0) -> str:
    """Return the ranking, within WIDTH columns if not 0; draws have the first place."""
    rows: list[tuple[str, ...]] = []
    first = leaders(results)
    for place, result in enumerate(results, 1):
        if result.fault:
            rows.append(("-", "failed", "", "", f"{result.candidate}: {result.fault}"))
            continue
        between = f"{min(result.speeds):.2f}-{max(result.speeds):.2f}"
        peak = max(trial.peak_bytes for trial in result.trials)
        row = (
            "1" if result in first else str(place),
            f"{result.speed:.2f}",
            between,
            f"{peak / 2**20:.0f} MiB" if peak else "",
            str(result.candidate),
        )
        rows += [row, *(("", "", "", "", f"  {remark}") for remark in result.remarks)]
    heads = ("", "steps/s", "between", "peak", "candidate")
    return tables.layout(rows, heads=heads, numbers=4, width=width)


def conclusion(out: str, results: Sequence[Result]) -> str:
    """Return which candidate is the fastest, if that was measured."""
    first = leaders(results)
    if not first:
        return "No candidate works, so there is nothing to choose."
    if len(first) == 1:
        remarks = "".join(f"\nOf the first: {remark}." for remark in first[0].remarks)
        return (
            f"Fastest: {first[0].candidate}. Add --strategy={out}/{BEST} to your launch.{remarks}"
        )
    listed = "; ".join(str(result.candidate) for result in first)
    return (
        f"No difference measured: {listed}. There is no {BEST} of a draw; give more --steps and "
        "--repeats, or choose by another measure."
    )


def strategy_text(best: Result) -> str:
    """Return a strategy file that sets the values of BEST.

    >>> values = (("amp_configs.incr_ratio", "4"), ("FLAGS_x", "1"), ("nccl_comm_num", "auto"))
    >>> print(strategy_text(Result(Candidate(values), (Trial((2.0,)),))), end="")
    # fleetrun tune: 2.00 steps/s, the median of 1 run.
    strategy:
      amp_configs:
        incr_ratio: 4.0
      nccl_comm_num: auto
    flags:
      FLAGS_x: '1'
    """
    content: dict[str, dict[str, Any]] = {}
    for key, text in best.candidate.values:
        setting = load.parse_set(f"{key}={text}")
        configs, dot, part = setting.name.partition(".")
        home = content.setdefault(setting.section, {})
        home = home.setdefault(configs, {}) if dot else home
        home[part or configs] = (
            list(setting.value) if isinstance(setting.value, tuple) else setting.value
        )
    how = f"{best.speed:.2f} steps/s, the median of {counted(len(best.trials), 'run')}"
    return f"# fleetrun tune: {how}.\n" + yaml.safe_dump(content, sort_keys=False)


def document(launch: parser.Launch, own: Mapping[str, Any], results: Sequence[Result]) -> str:
    """Return RESULTS of tuning LAUNCH with the options OWN as JSON."""
    first = leaders(results)
    words = [f"{setting.typed}={setting.raw}" for setting in launch.options]
    content = {
        "schema": 2,
        "launch": secrets.conceal([*words, *launch.script]),
        **{name: own[name] for name in ("steps", "warmup", "repeats")},
        "best": dict(first[0].candidate.values) if len(first) == 1 else None,
        "draw": [dict(result.candidate.values) for result in first] if len(first) > 1 else [],
        "candidates": [
            {
                "values": dict(result.candidate.values),
                "steps_per_s": result.speed or None,
                "between": [min(result.speeds), max(result.speeds)] if result.speeds else None,
                "peak_bytes": max(trial.peak_bytes for trial in result.trials) or None,
                "fault": result.fault or None,
                "remarks": list(result.remarks),
                "trials": [
                    {
                        "steps_per_s": trial.steps_per_s[0] if trial.steps_per_s else None,
                        # A loss may be NaN, which is no JSON.
                        "loss": None if trial.loss is None else repr(trial.loss),
                        "folder": trial.folder,
                    }
                    for trial in result.trials
                ],
            }
            for result in results
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def _candidates(launch: parser.Launch, own: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """Return the candidates for LAUNCH and the options OWN; UsageError if it cannot be tuned."""
    trials.refuse_taken(launch, "tune")
    for setting in launch.options:
        if setting.name in {"hosts", "hostfile"}:
            raise UsageError(
                f"tune takes no {setting.typed}: it measures on this host; start the job on "
                "several hosts with each strategy, and compare them with `fleetrun report`."
            )
    if not launch.script:
        raise UsageError(
            "no script to tune: write `fleetrun tune --vary nccl_comm_num=1,2 [options] train.py`."
        )
    fewest = own["warmup"] + trials.FEWEST_TIMED
    if own["steps"] < fewest:
        raise UsageError(
            f"--steps={own['steps']} leaves too few updates after --warmup={own['warmup']}: "
            f"give at least {fewest}."
        )
    candidates = grid(own["vary"])
    for key, value in dict.fromkeys(pair for tried in candidates for pair in tried.values):
        load.parse_set(f"{key}={value}")
    return candidates


def _tune(launch: parser.Launch, **own: Any) -> int:  # noqa: ANN401 - click's
    """Return 0, or 1 if no candidate works; UsageError if it cannot be tuned."""
    probe.current_folder()
    candidates = _candidates(launch, own)
    log = tell if own["json"] else say
    done: dict[Candidate, list[Trial]] = {candidate: [] for candidate in candidates}
    with trials.held_folder(own["out"]):
        log(f"fleetrun tune: {len(candidates)} candidates; everything is kept in {own['out']}")
        for repeat in range(own["repeats"]):
            for place, candidate in enumerate(candidates):
                if any(trial.fault for trial in done[candidate]):
                    continue
                folder = trials.new_folder(own["out"], "trials", f"{place:03}-{repeat}")
                trial = _train(candidate, launch, folder, own)
                done[candidate].append(trial)
                log(f"  {candidate}: {trial.fault or f'{trial.steps_per_s[0]:.2f} steps/s'}")
        results = ranked(done)
        first = leaders(results)
        results_text = document(launch, own, results)
        Path(own["out"], RESULTS).write_text(results_text, encoding="utf-8")
        best = Path(own["out"], BEST)
        # That of an earlier tuning.
        best.unlink(missing_ok=True)
        if len(first) == 1:
            best.write_text(strategy_text(first[0]), encoding="utf-8")
    log(table(results, tables.width()))
    log(conclusion(own["out"], results))
    if own["json"]:
        put(results_text)
    return 0 if first else 1


command = parser.LaunchCommand(
    "tune",
    help="Train a few steps with every combination of the values, in turns, and rank them. The "
    "script runs unmodified, with the launch options and one --set KEY=VALUE for each --vary.",
    options_metavar="--vary KEY=A,B,... [--vary ...] [OPTIONS] [LAUNCH OPTIONS] "
    "SCRIPT [ARGUMENTS]...",
    callback=click.pass_obj(_tune),
    params=[
        parser.option(
            "vary",
            FieldValues(),
            "A field of the strategy and the values to try (repeatable), as for --set.",
            metavar="KEY=A,B,...",
        ),
        parser.option(
            "steps", types.number(minimum=2), "Number of updates of a run.", default="30"
        ),
        parser.option(
            "warmup",
            types.number(minimum=0),
            "Number of first updates of each run that are not timed.",
            default="5",
        ),
        parser.option(
            "repeats", types.number(minimum=1), "Runs of each candidate, in turns.", default="2"
        ),
        trials.TIMEOUT,
        parser.option(
            "out",
            types.FOLDER,
            "Output folder: best.yaml, tune.json, trials/.",
            default="tune",
            metavar="DIR",
        ),
        parser.option(
            "json", types.FLAG, "Print tune.json at the end, and everything else on standard error."
        ),
    ],
)
