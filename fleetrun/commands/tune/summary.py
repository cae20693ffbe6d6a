"""Writes the results of a tuning: a ranking, best.yaml and tune.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fleetrun.commands import tables, trials
from fleetrun.commands.tune.candidates import Candidate, TuneSpec
from fleetrun.commands.tune.halving import Result
from fleetrun.rundir import arguments, names, reading, secrets
from fleetrun.strategy import fields, load
from fleetrun.text import counted

BEST, DATA = "best.yaml", "tune.json"


def table(results: Sequence[Result], width: int = 0) -> str:
    """Return the ranking, within WIDTH columns if not 0.

    A step is a micro-step, so that merged gradients compare with others.
    """
    rows: list[tuple[str, ...]] = []
    drawn = leaders(results)
    for place, result in enumerate(results, 1):
        if result.fault:
            rows.append(("-", "failed", "", "", "", f"{result.candidate}: {result.fault}"))
            continue
        # One run has no spread.
        spread = f"{result.spread:.1%}" if len(result.trials) > 1 else "-"
        peak = f"{result.peak_bytes / 2**20:.0f} MiB" if result.peak_bytes else ""
        row = (
            "1" if result in drawn else str(place),
            f"{result.speed:.2f}",
            spread,
            peak,
            str(result.steps),
            str(result.candidate),
        )
        rows.append(row)
        rows += [("", "", "", "", "", f"  {remark}") for remark in result.remarks]
    heads = ("", "steps/s", "spread", "peak", "updates", "candidate")
    return tables.layout(rows, heads=heads, numbers=5, width=width)


def leaders(results: Sequence[Result]) -> list[Result]:
    """Return the first result that works, and those that no measurement tells from it."""
    finished = [result for result in results if not result.fault]
    return [
        result
        for result in finished
        if result.equals(finished[0])
        or (result.round == finished[0].round and trials.overlap(result.speeds, finished[0].speeds))
    ]


def conclusion(spec: TuneSpec, results: Sequence[Result]) -> str:
    """Return which candidate is the fastest, if that was measured."""
    first = leaders(results)
    if not first:
        return "No candidate works, so there is nothing to choose."
    if len(first) == 1:
        of_round = (
            " of the last round"
            if any(lost.round < first[0].round for lost in results if not lost.fault)
            else ""
        )
        remarks = "".join(f"\nOf the first: {remark}." for remark in first[0].remarks)
        how = f"Launch with --strategy={spec.out}/{BEST}."
        return f"Fastest{of_round}: {first[0].candidate}. {how}{remarks}"
    names = "; ".join(str(result.candidate) for result in first)
    if all(result.equals(first[0]) for result in first):
        return f"No difference measured, equal in effect: {names}. There is no {BEST} of a draw."
    return (
        f"No difference measured, as speeds overlap: {names}. There is no {BEST} of a draw; give "
        "more --steps and --repeats, or choose by another measure."
    )


def write(spec: TuneSpec, results: Sequence[Result]) -> None:
    """Write all results into the requested folder; best.yaml only if one is the fastest."""
    first = leaders(results)
    best = first[0] if len(first) == 1 else None
    texts = {DATA: _data(spec, results, best)}
    if best is None:
        # Remove the best of an earlier tuning.
        (Path(spec.out) / BEST).unlink(missing_ok=True)
    else:
        path = Path(best.trials[-1].folder) / "log" / names.LATEST / names.STRATEGY
        texts[BEST] = yaml_of(best, reading.document(str(path)) or {})
    trials.write(spec.out, texts)


def yaml_of(best: Result, strategy: dict[str, Any]) -> str:
    """Return BEST as a self-contained strategy file: all of STRATEGY, with its values.

    >>> from fleetrun.commands.tune.halving import Result, Trial
    >>> from fleetrun.commands.tune.candidates import Candidate
    >>> values = (("amp_configs.incr_ratio", "4"), ("FLAGS_x", "1"), ("nccl_comm_num", "auto"))
    >>> base = {"strategy": {"amp": True, "nccl_comm_num": "auto"}, "environment": {"NCCL_A": "x"}}
    >>> print(yaml_of(Result(Candidate(values), 1, 30, (Trial((2.0,)),)), base), end="")
    # fleetrun tune: 2.00 steps/s, spread 0.0%, 1 run of 30 updates.
    strategy:
      amp: true
      nccl_comm_num: auto
      amp_configs:
        incr_ratio: 4.0
    flags:
      FLAGS_x: '1'
    nccl:
      NCCL_A: x
    """
    runs = f"{counted(len(best.trials), 'run')} of {best.steps} updates"
    how = f"{best.speed:.2f} steps/s, spread {best.spread:.1%}, {runs}"
    document = _merged(best.candidate, strategy)
    body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return f"# fleetrun tune: {how}.\n{body}"


def _merged(candidate: Candidate, strategy: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return STRATEGY by section, with the values of CANDIDATE."""
    document: dict[str, dict[str, Any]] = {section: {} for section in fields.SECTIONS}
    for section in fields.FIELD_SECTIONS:
        document[section] |= copy.deepcopy(strategy.get(section, {}))
    for name, value in strategy.get("environment", {}).items():
        # The placeholder of a secret is not a value.
        if secrets.HIDDEN not in value:
            document[_section_of(name)][name] = value
    for key, text in candidate.values:
        knob = load.parse_set(f"{key}={text}")
        configs, dot, part = knob.name.partition(".")
        home = document[knob.section].setdefault(configs, {}) if dot else document[knob.section]
        home.setdefault(
            part or configs, list(knob.value) if isinstance(knob.value, tuple) else knob.value
        )
    return {section: values for section, values in document.items() if values}


def _section_of(variable: str) -> str:
    prefixes = fields.PREFIXES.items()
    return next(section for section, prefix in prefixes if variable.startswith(prefix))


def _data(spec: TuneSpec, results: Sequence[Result], best: Result | None) -> str:
    document = {
        "schema": 1,
        "launch": arguments.conceal([*spec.launch, *spec.script])[0],
        "steps": spec.steps,
        "warmup": spec.warmup,
        "repeats": spec.repeats,
        "best": None if best is None else dict(best.candidate.values),
        "draw": [dict(result.candidate.values) for result in leaders(results) if best is None],
        "candidates": [
            {
                "values": dict(result.candidate.values),
                "round": result.round,
                "updates": result.steps,
                "steps_per_s": result.speed or None,
                "spread": result.spread,
                "peak_bytes": result.peak_bytes,
                "fault": result.fault or None,
                "remarks": list(result.remarks),
                "trials": [
                    {
                        "updates_per_s": trial.speeds[0] if trial.speeds else None,
                        "merged": trial.merged,
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
    return json.dumps(document, indent=1) + "\n"
