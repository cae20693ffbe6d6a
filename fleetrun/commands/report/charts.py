"""The charts of a page, as plotly's figures; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleetrun.commands.report.history import ALONG, FIRST, OPEN, WELL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.commands.report.history import RunHistory, Use
    from fleetrun.records.tracefile import TraceRecord

Figure = dict[str, Any]
_COLORS = {WELL: "#2e9e5b", FIRST: "#d33f3f", ALONG: "#b8b8b8", OPEN: "#3b7dd8"}
# Of a step: what people read, and the colour.
_SPANS = {
    "data": ("data loading", "#7a6a4f"),
    "forward": ("forward", "#3b7dd8"),
    "run": ("program", "#3b7dd8"),
    "backward": ("backward", "#9cc3f5"),
    "send": ("packing and sending", "#159aa5"),
    "wait": ("waiting", "#d33f3f"),
    "update": ("update", "#2e9e5b"),
    "flight": ("allreduce in flight", "#e08a1e"),
}
_PALETTE = ("#3b7dd8", "#e08a1e", "#2e9e5b", "#9a5fd0", "#d33f3f", "#159aa5", "#7a6a4f", "#666666")
# A row's height in pixels where there is room, and where the chart stops growing.
_ROW, _LEAST, _MOST = 22, 160, 900
_MIB = 1 << 20
_MOST_LINES = 8


def timeline(run: RunHistory) -> Figure:
    """Return when each attempt of each process ran, by how it ended."""
    labels = list(dict.fromkeys(bar.label for bar in run.bars))
    place = {label: index for index, label in enumerate(labels)}
    traces = []
    for kind, color in _COLORS.items():
        bars = [bar for bar in run.bars if bar.kind == kind]
        if bars:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": kind,
                    "y": [place[bar.label] for bar in bars],
                    "base": [round(bar.begin, 3) for bar in bars],
                    "x": [round(max(bar.end - bar.begin, 0.001), 3) for bar in bars],
                    "text": [
                        f"{bar.label}{f' on {bar.host}' if bar.host else ''}, attempt "
                        f"{bar.attempt}: {bar.how} after {bar.end - bar.begin:.1f} s"
                        for bar in bars
                    ],
                    "textposition": "none",
                    "hovertemplate": "%{text}<extra></extra>",
                    # Else each kind has a width of its own, by how near its rows are.
                    "width": 0.8,
                    "marker": {"color": color},
                }
            )
    if run.moments:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "events",
                "x": [round(one.at, 3) for one in run.moments],
                "y": [-1] * len(run.moments),
                "text": [f"{one.what}: {one.text}" for one in run.moments],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": "#222222", "symbol": "diamond", "size": 8},
            }
        )
    height = min(max(_LEAST, 90 + _ROW * len(labels)), _MOST)
    step = max(1, -(-len(labels) * _ROW // (_MOST - 90)))
    figure = _figure(traces, "seconds since the start", "", height)
    figure["layout"] |= {"barmode": "overlay", "bargap": 0.15 if step == 1 else 0}
    figure["layout"]["yaxis"] |= {
        "tickvals": list(range(0, len(labels), step)),
        "ticktext": labels[::step],
        "range": [len(labels) - 0.4, -1.6 if run.moments else -0.6],
    }
    return figure


def losses(stories: Sequence[RunHistory]) -> Figure | None:
    """Return the losses that ranks printed, by step; None where none did."""
    return _lines(stories, "loss")


def steps(stories: Sequence[RunHistory]) -> Figure | None:
    """Return the steps that ranks printed, by time; None where none did."""
    return _lines(stories, "step")


def _lines(stories: Sequence[RunHistory], what: str) -> Figure | None:
    traces: list[dict[str, Any]] = []
    for number, run in enumerate(stories):
        for curve in run.curves:
            has_losses = any(loss is not None for loss in curve.losses)
            if not (has_losses if what == "loss" else curve.has_steps):
                continue
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(curve.steps) < 30 else "lines",
                    "name": f"{'AB'[number]}: {curve.label}" if len(stories) > 1 else curve.label,
                    "x": curve.steps if what == "loss" else curve.at,
                    "y": _finite(curve.losses) if what == "loss" else curve.steps,
                    "line": {
                        "color": _PALETTE[len(traces) % len(_PALETTE)],
                        "dash": "solid" if number == 0 else "dash",
                    },
                }
            )
    if not traces:
        return None
    is_stepped = all(curve.has_steps for run in stories for curve in run.curves)
    below = "step" if is_stepped else "step, or number of the loss"
    titles = (below, "loss") if what == "loss" else ("seconds since the start", "step")
    return _figure(traces, *titles, 320)


def _finite(losses: Sequence[float | None]) -> list[float | None]:
    """Return LOSSES with gaps where they are no number: JSON has no word for those."""
    return [loss if loss is not None and abs(loss) < float("inf") else None for loss in losses]


def use(used: Use) -> Figure:
    """Return what each row used over time: as lines, or of many rows as a map of colours."""
    if len(used.rows) <= _MOST_LINES:
        lines = [
            {"type": "scatter", "mode": "lines+markers", "name": row, "x": used.at, "y": values}
            for row, values in zip(used.rows, used.values, strict=True)
        ]
        figure = _figure(lines, "seconds since the start", used.unit, 280)
        figure["layout"]["yaxis"]["rangemode"] = "tozero"
        return figure
    trace = {
        "type": "heatmap",
        "x": used.at,
        "y": used.rows,
        "z": used.values,
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": used.unit}},
        "hovertemplate": "%{y} at %{x} s: %{z}<extra></extra>",
    }
    height = min(max(_LEAST, 90 + _ROW * len(used.rows)), _MOST)
    figure = _figure([trace], "seconds since the start", "", height)
    figure["layout"]["yaxis"] |= {"autorange": "reversed", "nticks": 30, "type": "category"}
    return figure


def memory(run: RunHistory) -> Figure | None:
    """Return the most memory that each process ever held, in its last attempt that is known."""
    peaks = {bar.label: bar.peak_bytes for bar in run.bars if bar.peak_bytes}
    if not peaks:
        return None
    trace = {
        "type": "bar",
        "x": list(peaks),
        "y": [round(peak / _MIB, 1) for peak in peaks.values()],
        "marker": {"color": _COLORS[OPEN]},
        "hovertemplate": "%{x}: %{y} MiB<extra></extra>",
    }
    return _figure([trace], "", "MiB", 260)


def buckets(run: RunHistory) -> Figure | None:
    """Return the size of each bucket of gradients, in the order in which they are sent."""
    if not run.buckets:
        return None
    trace = {
        "type": "bar",
        "x": [f"bucket {index}" for index in range(len(run.buckets))],
        "y": [round(size / _MIB, 3) for size in run.buckets],
        "marker": {"color": _PALETTE[1]},
        "hovertemplate": "%{x}: %{y} MiB<extra></extra>",
    }
    return _figure([trace], "", "MiB", 260)


def step(trace: TraceRecord) -> Figure:
    """Return when a rank did what in the last step that it recorded, each bucket in its row."""
    steps = [span for span in trace.spans if span.kind == "step"]
    begin = steps[-1].begin if steps else 0.0
    spans = [span for span in trace.spans if span.begin >= begin and span.kind != "step"]
    tracks = list(dict.fromkeys(["training", *(span.track for span in spans)]))
    # What stands inside another is drawn after it.
    kinds = [kind for kind in _SPANS if any(span.kind == kind for span in spans)]
    kinds += sorted({span.kind for span in spans} - set(kinds))
    drawn = []
    for kind in kinds:
        mine = [span for span in spans if span.kind == kind]
        drawn.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _SPANS.get(kind, (kind, ""))[0],
                "y": [tracks.index(span.track) for span in mine],
                "base": [round((span.begin - begin) * 1e3, 4) for span in mine],
                "x": [round(span.seconds * 1e3, 4) for span in mine],
                "text": [f"{span.name}: {span.seconds * 1e3:.2f} ms" for span in mine],
                "textposition": "none",
                "hovertemplate": "%{text}<extra></extra>",
                "width": 0.8,
                "marker": {"color": _SPANS.get(kind, ("", "#999999"))[1]},
            }
        )
    height = min(max(_LEAST, 110 + _ROW * len(tracks)), _MOST)
    figure = _figure(drawn, "milliseconds since the step began", "", height)
    figure["layout"]["barmode"] = "overlay"
    # One kind alone, as of a static graph, has to be named, too.
    figure["layout"]["showlegend"] = True
    figure["layout"]["yaxis"] |= {
        "tickvals": list(range(len(tracks))),
        "ticktext": tracks,
        "range": [len(tracks) - 0.4, -0.6],
    }
    return figure


def _figure(traces: list[dict[str, Any]], below: str, beside: str, height: int) -> Figure:
    return {
        "data": traces,
        "layout": {
            "height": height,
            "margin": {"l": 80, "r": 20, "t": 10, "b": 45},
            "xaxis": {"title": {"text": below}, "automargin": True},
            "yaxis": {"title": {"text": beside}, "automargin": True},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "showlegend": len(traces) > 1,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 12},
        },
        "config": {"displayModeBar": False, "responsive": True},
    }
