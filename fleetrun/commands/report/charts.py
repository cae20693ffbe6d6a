"""The charts of a page; pure."""

from __future__ import annotations

from collections.abc import Sequence

from fleetrun.commands.report import svg
from fleetrun.commands.report.history import ALIVE, ALONG, FIRST, OPEN, WELL, RunHistory, Use

COLORS = {WELL: "#2e9e5b", FIRST: "#d33f3f", ALONG: "#a3a8b0", ALIVE: "#3b7dd8", OPEN: "#7fa9de"}
_PALETTE = ("#3b7dd8", "#e08a1e", "#2e9e5b", "#9a5fd0", "#d33f3f", "#159aa5", "#7a6a4f", "#808080")
# Two runs side by side: the ranks of one in cold colours, those of the other in warm ones.
_SIDES = (
    ("#1f5fb8", "#4a8ae0", "#86b4f0", "#5a4fcf", "#9a93ec", "#159aa5", "#66c4cc", "#3d7f9e"),
    ("#c2690c", "#e9973f", "#f3bd82", "#b8321f", "#e0705f", "#a8820a", "#d6b447", "#8c5a3c"),
)
_MIB = 1 << 20
_MOST_LINES = 8
# From this many points on, their average says more than the points.
_MANY_POINTS = 60


def timeline(run: RunHistory) -> str:
    """Return the timeline of each process' attempts, coloured by how they ended."""
    titles = {bar.label: bar.title for bar in run.bars}
    place = {label: index for index, label in enumerate(titles)}
    spans = [
        svg.Segment(
            *(place[bar.label], bar.begin, bar.end, COLORS[bar.kind]),
            f"{bar.title}{f' on {bar.host}' if bar.host else ''}, attempt "
            f"{bar.attempt}: {bar.how} after {bar.end - bar.begin:.1f} s",
        )
        for bar in run.bars
    ]
    kinds = {bar.kind for bar in run.bars}
    return svg.lanes(
        list(titles.values()),
        spans,
        "seconds since the start",
        [(kind, color) for kind, color in COLORS.items() if kind in kinds],
        [(moment.at, f"{moment.what}: {moment.text}") for moment in run.moments],
    )


def losses(stories: Sequence[RunHistory]) -> str | None:
    """Return the chart of printed losses by step; None without any."""
    return _lines(stories, "loss")


def steps(stories: Sequence[RunHistory]) -> str | None:
    """Return the chart of printed steps by time; None without any."""
    return _lines(stories, "step")


def _lines(stories: Sequence[RunHistory], quantity: str) -> str | None:
    lines: list[svg.Line] = []
    for number, run in enumerate(stories):
        colors = _SIDES[number] if len(stories) > 1 else _PALETTE
        drawn = 0
        for curve in run.curves:
            has_losses = any(loss is not None for loss in curve.losses)
            if not (has_losses if quantity == "loss" else curve.has_steps):
                continue
            name = f"{'AB'[number]}: {curve.label}" if len(stories) > 1 else curve.label
            color = colors[drawn % len(colors)]
            drawn += 1
            if quantity == "step":
                lines.append(svg.Line(name, curve.at, curve.steps, color))
                continue
            lines += _smooth(name, curve.steps, _finite(curve.losses), color)
    if not lines:
        return None
    is_stepped = all(curve.has_steps for run in stories for curve in run.curves)
    below = "step" if is_stepped else "step, or index of the loss"
    return svg.lines(
        lines, *((below, "loss") if quantity == "loss" else ("seconds since the start", "step"))
    )


def _smooth(
    name: str, steps: Sequence[int], values: list[float | None], color: str
) -> list[svg.Line]:
    """Return VALUES as a line; if they are many, a faint one below their average."""
    if len(values) < _MANY_POINTS:
        return [svg.Line(name, steps, values, color)]
    faint = svg.Line(name, steps, values, color, faint=True)
    return [faint, svg.Line(name, steps, svg.smoothed(values), color)]


def _finite(losses: Sequence[float | None]) -> list[float | None]:
    """Return LOSSES with gaps in place of infinities and NaN."""
    return [loss if loss is not None and abs(loss) < float("inf") else None for loss in losses]


def use(used: Use) -> str:
    """Return what each row used over time: as lines, or as a heat map of many rows."""
    below = "seconds since the start"
    if len(used.rows) > _MOST_LINES:
        return svg.shades(used.rows, used.at, used.values, below, used.unit)
    lines = [
        svg.Line(row, used.at, values, _PALETTE[at % len(_PALETTE)])
        for at, (row, values) in enumerate(zip(used.rows, used.values, strict=True))
    ]
    return svg.lines(lines, below, used.unit, from_zero=True)


def memory(run: RunHistory) -> str | None:
    """Return the peak memory of each process in its last known attempt."""
    peaks = {bar.label: bar.peak_bytes for bar in run.bars if bar.peak_bytes}
    rows = [(label, round(peak / _MIB, 1)) for label, peak in peaks.items()]
    return svg.columns(rows, "MiB", COLORS[OPEN]) if rows else None


def buckets(run: RunHistory) -> str | None:
    """Return the size of each bucket of gradients, in the order of sending."""
    rows = [(f"bucket {index}", round(size / _MIB, 3)) for index, size in enumerate(run.buckets)]
    return svg.columns(rows, "MiB", _PALETTE[1]) if rows else None
