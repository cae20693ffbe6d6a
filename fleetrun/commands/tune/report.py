"""What a tuning came to: a ranking to read, best.yaml to use, tune.json and tune.html to keep."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetrun.plan import arguments, secrets
from fleetrun.strategy import fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.commands.tune.halving import Result
    from fleetrun.commands.tune.spec import Candidate, TuneSpec

BEST, DATA, PAGE = "best.yaml", "tune.json", "tune.html"
_BAR, _LEFT, _WIDTH = 26, 330, 900


def table(results: Sequence[Result]) -> str:
    """Return the ranking; a step is a micro-step, so that merged gradients compare with others."""
    lines = [f"{'':3}{'steps/s':>10}{'spread':>8}{'peak':>10}{'updates':>9}  candidate"]
    for place, one in enumerate(results, 1):
        if one.fault:
            lines.append(f"{'-':>3}{'failed':>10}{'':27}  {one.candidate}: {one.fault}")
            continue
        # One run has no spread.
        spread = f"{one.spread:.1%}" if len(one.trials) > 1 else "-"
        peak = f"{one.peak_bytes / 2**20:.0f} MiB" if one.peak_bytes else ""
        lines.append(
            f"{place:>3}{one.speed:>10.2f}{spread:>8}{peak:>10}{one.steps:>9}  {one.candidate}"
        )
        lines += [f"{'':42}{remark}" for remark in one.remarks]
    return "\n".join(lines)


def best_of(results: Sequence[Result]) -> Result | None:
    """Return the first that works."""
    return next((one for one in results if not one.fault), None)


def doubts(results: Sequence[Result]) -> list[str]:
    """Say why the first may not really be the best."""
    rivals = [one for one in results if not one.fault]
    found = []
    if len(rivals) > 1 and rivals[0].round == rivals[1].round:
        best, second = rivals[:2]
        lead = best.speed / second.speed - 1 if second.speed else 1.0
        if lead < max(best.spread, second.spread):
            found.append(
                f"The first is only {lead:.1%} ahead, and runs of the same differ by up to "
                f"{max(best.spread, second.spread):.1%}: take it as a draw, or give more --steps "
                "and --repeats."
            )
    if rivals and rivals[0].remarks:
        found.append(f"Of the first: {'; '.join(rivals[0].remarks)}.")
    return found


def write(spec: TuneSpec, results: Sequence[Result]) -> Result | None:
    """Leave everything in the folder that was asked for; best.yaml only if something works."""
    folder = Path(spec.out)
    folder.mkdir(parents=True, exist_ok=True)
    best = best_of(results)
    (folder / DATA).write_text(_data(spec, results, best))
    (folder / PAGE).write_text(page(results), encoding="utf-8")
    if best is None:
        # Not the best of an earlier tune.
        (folder / BEST).unlink(missing_ok=True)
    else:
        (folder / BEST).write_text(yaml_of(best, strategy_of(best)))
    return best


def strategy_of(best: Result) -> dict[str, Any]:
    """Return the whole strategy that BEST was launched with; nothing if it is not there."""
    path = Path(best.trials[-1].folder) / "log" / "latest" / "strategy.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def yaml_of(best: Result, strategy: dict[str, Any]) -> str:
    """Return BEST as a strategy file that needs no other: all of STRATEGY, with its values.

    >>> from fleetrun.commands.tune.halving import Result, Trial
    >>> from fleetrun.commands.tune.spec import Candidate
    >>> candidate = Candidate((("a_configs.k", "4"), ("flags.FLAGS_x", "1"), ("b", "auto")))
    >>> base = {"strategy": {"a": True, "b": "auto"}, "environment": {"NCCL_DEBUG": "INFO"}}
    >>> print(yaml_of(Result(candidate, 1, 30, (Trial(2.0),)), base), end="")
    # fleetrun tune: 2.00 steps/s, spread 0.0%, 1 run of 30 updates.
    strategy:
      a: true
      b: auto
      a_configs:
        k: 4
    flags:
      FLAGS_x: 1
    nccl:
      NCCL_DEBUG: INFO
    """
    runs = f"{len(best.trials)} run{'s' if len(best.trials) > 1 else ''}"
    how = f"{best.speed:.2f} steps/s, spread {best.spread:.1%}, {runs} of {best.steps} updates"
    lines = [f"# fleetrun tune: {how}."]
    for section, values in _whole(best.candidate, strategy).items():
        lines.append(f"{section}:")
        for name, value in values.items():
            if isinstance(value, dict):
                lines.append(f"  {name}:")
                lines += [f"    {part}: {_scalar(one)}" for part, one in value.items()]
            else:
                lines.append(f"  {name}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _whole(candidate: Candidate, strategy: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {section: {} for section in fields.SECTIONS}
    for section in fields.FIELD_SECTIONS:
        found[section] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in strategy.get(section, {}).items()
        }
    for name, value in strategy.get("environment", {}).items():
        # What stands for a secret is no value.
        if secrets.HIDDEN not in value:
            found[_section_of(name)][name] = value
    for key, value in candidate.values:
        knob = key.partition(".")
        section, name = (knob[0], knob[2]) if knob[0] in fields.SECTIONS else (fields.STRATEGY, key)
        home = next((one for one in fields.FIELD_SECTIONS if name in found[one]), section)
        configs, dot, part = name.partition(".")
        if dot:
            found[home].setdefault(configs, {}).setdefault(part, value)
        else:
            found[home].setdefault(name, value)
    return {section: values for section, values in found.items() if values}


def _section_of(variable: str) -> str:
    prefixes = fields.PREFIXES.items()
    return next(section for section, prefix in prefixes if variable.startswith(prefix))


def _scalar(value: object) -> str:
    """Write VALUE as YAML: what was typed stays as it is.

    >>> _scalar(True), _scalar("auto"), _scalar(["a", "b: c"]), _scalar(0.5), _scalar("on: x")
    ('true', 'auto', '["a", "b: c"]', '0.5', '"on: x"')
    """
    if isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value):
        return value
    return json.dumps(value)


def _data(spec: TuneSpec, results: Sequence[Result], best: Result | None) -> str:
    document = {
        "schema": 1,
        "launch": arguments.conceal([*spec.launch, *spec.script])[0],
        "steps": spec.steps,
        "warmup": spec.warmup,
        "repeats": spec.repeats,
        "best": None if best is None else dict(best.candidate.values),
        "candidates": [
            {
                "values": dict(one.candidate.values),
                "round": one.round,
                "updates": one.steps,
                "steps_per_s": one.speed or None,
                "spread": one.spread,
                "peak_bytes": one.peak_bytes,
                "fault": one.fault or None,
                "remarks": list(one.remarks),
                "trials": [
                    {
                        "updates_per_s": trial.updates_per_s or None,
                        "merged": trial.merged,
                        # A loss may be NaN, which is no JSON.
                        "loss": None if trial.loss is None else repr(trial.loss),
                        "folder": trial.folder,
                    }
                    for trial in one.trials
                ],
            }
            for one in results
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def page(results: Sequence[Result]) -> str:
    """Return an HTML page with a bar for each candidate and a dot for each of its runs."""
    most = max((trial.speed for one in results for trial in one.trials), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - 90) / most
    bars = []
    for place, one in enumerate(results):
        top = place * _BAR + 4
        name = html.escape(str(one.candidate))
        hint = html.escape("; ".join((one.fault, *one.remarks)).strip("; "))
        length = one.speed * scale
        said = "failed" if one.fault else f"{one.speed:.2f}"
        bars.append(
            f'<g><title>{name} {hint}</title><text x="{_LEFT - 8}" y="{top + 14}" '
            f'text-anchor="end">{name}</text>'
            f'<rect x="{_LEFT}" y="{top}" width="{length:.1f}" height="{_BAR - 8}" '
            f'fill="{"#2a7" if place == 0 and not one.fault else "#9bd"}"/>'
            + "".join(
                f'<circle cx="{_LEFT + trial.speed * scale:.1f}" cy="{top + 9}" r="3"/>'
                for trial in one.trials
                if not trial.fault
            )
            + f'<text x="{_LEFT + length + 12:.1f}" y="{top + 14}">{said}</text></g>'
        )
    height = len(results) * _BAR + 8
    return (
        '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>fleetrun tune</title>\n'
        "<style>body{font:14px sans-serif;margin:2em}text{font:12px sans-serif}</style>\n"
        "<h1>Steps a second</h1>\n"
        "<p>A bar is the median of a candidate's runs in its last round, a dot one run.</p>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}">\n'
        + "\n".join(bars)
        + f"\n</svg>\n<pre>{html.escape(table(results))}</pre></html>\n"
    )
