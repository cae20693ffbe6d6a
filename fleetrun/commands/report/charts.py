"""The charts of a page as data, which the page's script draws; pure."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from fleetrun.commands.report.history import COLLECTIVES, Curve, RunHistory
from fleetrun.text import visible

# A chart of fewer says nothing that a number does not say.
_FEWEST_POINTS = 3
# From this many points on, their average says more than the points.
_MANY_POINTS = 60
_SMOOTHED = "Faint: as printed; bold: the mean of {} values around each."


def of_run(run: RunHistory) -> dict[str, dict[str, Any]]:
    """Return the charts of RUN by name, those that say something."""
    charts = {"processes": _processes(run)} if run.bars else {}
    maps = [
        {
            "title": used.title,
            "unit": used.unit,
            "rows": [*map(visible, used.rows)],
            "at": used.at,
            "values": _packed(used.values),
        }
        for used in run.uses
        if len(used.at) >= _FEWEST_POINTS
    ]
    if maps:
        first = COLLECTIVES if any(moment.what == "hung" for moment in run.moments) else ""
        charts["maps"] = {**_common([run]), "maps": maps, "first": first}
    return charts | of_curves([run])


def of_curves(stories: Sequence[RunHistory]) -> dict[str, dict[str, Any]]:
    """Return the charts of the losses and steps of one or two STORIES over their time."""
    charts = {}
    for name in ("loss", "steps"):
        lines = [
            line
            for side, run in zip("AB" if len(stories) > 1 else ("",), stories, strict=True)
            for line in _lines(run, name, side)
        ]
        if lines:
            counts = {line.pop("near") for line in lines} - {0}
            note = _SMOOTHED.format(max(counts)) if counts else ""
            charts[name] = {**_common(stories), "lines": lines, "note": note}
    return charts


def _common(stories: Sequence[RunHistory]) -> dict[str, Any]:
    """Return what all charts of STORIES share: the seconds of their axis, and who is marked."""
    return {
        # A rank may print something after the last event.
        "span": max(
            1e-3,
            *(run.seconds for run in stories),
            *(curve.at[-1] for run in stories for curve in run.curves if curve.at),
        ),
        "culprits": [visible(label) for run in stories for label in run.culprits],
    }


def _processes(run: RunHistory) -> dict[str, Any]:
    """Return the attempts of each process of RUN over time, by how they ended."""
    titles = {bar.label: visible(bar.title) for bar in run.bars}
    place = {label: index for index, label in enumerate(titles)}
    spans = []
    for bar in run.bars:
        host = f" on {bar.host}" if bar.host else ""
        took = f"attempt {bar.attempt}: {bar.how} after {bar.end - bar.begin:.1f} s"
        tip = f"{titles[bar.label]}{host}, {took}"
        spans.append((place[bar.label], round(bar.begin, 3), round(bar.end, 3), bar.kind, tip))
    moments = [
        (round(moment.at, 3), visible(f"{moment.what}: {moment.text}")) for moment in run.moments
    ]
    return {**_common([run]), "rows": [*titles.values()], "spans": spans, "moments": moments}


def _lines(run: RunHistory, name: str, side: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of RUN's losses or steps; SIDE is its letter beside another run."""
    for curve in run.curves:
        values = _finite(curve) if name == "loss" else [*curve.steps]
        known = sum(value is not None for value in values)
        if known < _FEWEST_POINTS or not (name == "loss" or curve.has_steps):
            continue
        near = len(values) // 50 if name == "loss" and len(values) >= _MANY_POINTS else 0
        label = f"{side}: {curve.label}" if side else curve.label
        yield {
            "name": visible(label),
            "side": side,
            "x": curve.at,
            "y": values,
            "mean": smoothed(values, near) if near else None,
            "near": 2 * near + 1 if near else 0,
        }


def _finite(curve: Curve) -> list[float | None]:
    """Return the losses of CURVE with gaps in place of infinities and NaN."""
    return [
        loss if loss is not None and abs(loss) < float("inf") else None for loss in curve.losses
    ]


def smoothed(values: Sequence[float | None], near: int) -> list[float | None]:
    """Return the moving average of VALUES, over NEAR of them on both sides.

    >>> smoothed([1.0, None, 3.0, 5.0], 1)
    [1.0, None, 4.0, 4.0]
    """
    sums = [0.0, *accumulate(value or 0.0 for value in values)]
    counts = [0, *accumulate(int(value is not None) for value in values)]
    means: list[float | None] = []
    for at, value in enumerate(values):
        left, right = max(0, at - near), min(len(values), at + near + 1)
        mean = (sums[right] - sums[left]) / max(counts[right] - counts[left], 1)
        means.append(None if value is None else mean)
    return means


def _packed(rows: Sequence[Sequence[float | None]]) -> str:
    """Return the numbers of ROWS, row by row, as 32-bit floats in base64; NaN for None."""
    numbers = array("f")
    for row in rows:
        numbers.extend(float("nan") if value is None else value for value in row)
    return base64.b64encode(numbers.tobytes()).decode()
