"""A run, or two side by side, as one HTML file that needs no network."""

from __future__ import annotations

import html
import json
import os
from datetime import datetime, timezone
from string import Template
from typing import TYPE_CHECKING

from fleetrun.commands.report import charts
from fleetrun.commands.report.history import FIRST
from fleetrun.conversion import duration
from fleetrun.plan.visible import visible, visible_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fleetrun.commands.report.charts import Figure
    from fleetrun.commands.report.history import RunHistory

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light }
body { font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1.5em; max-width: $width;
  color: #1d2433; background: #f6f7f9 }
h1 { font-size: 1.5em; margin: 0 0 .2em } h2 { font-size: 1.05em; margin: 1.4em 0 .4em }
.runs { display: grid; grid-template-columns: repeat($count, minmax(0, 1fr)); gap: 1.5em }
section, .run { min-width: 0 }
.card { background: #fff; border: 1px solid #dfe3ea; border-radius: 8px; padding: .8em 1em }
.verdict { display: inline-block; border-radius: 5px; padding: .15em .6em; color: #fff;
  background: #2e9e5b } .verdict.bad { background: #d33f3f } .verdict.open { background: #3b7dd8 }
.numbers { display: flex; flex-wrap: wrap; gap: .4em 2em; margin: .7em 0 0 }
#differs ~ .runs { margin-top: 2em }
.numbers b { display: block; font-size: 1.25em }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: .2em .8em .2em 0; vertical-align: top;
  border-bottom: 1px solid #eceff4 }
td:last-child, #differs td { overflow-wrap: anywhere } td:first-child { white-space: nowrap }
th { font-weight: 600; white-space: nowrap }
pre { overflow: auto; max-height: 24em; margin: .4em 0 0; font-size: 12px }
.effective { color: #217a45 } .no_effect, .refused, .no_word { color: #b3541e }
.logs { columns: 9em; max-height: 16em; overflow: auto }
</style></head><body>
$body
<script>$library</script>
<script type="application/json" id="figures">$figures</script>
<script>
const figures = JSON.parse(document.getElementById("figures").textContent);
for (const [id, figure] of Object.entries(figures))
  Plotly.newPlot(id, figure.data, figure.layout, figure.config);
</script>
</body></html>
""")
_MOST_MOMENTS = 200


def page(stories: Sequence[RunHistory], library: str, folder: str) -> str:
    """Return the page of STORIES, one or two, with the text of plotly's LIBRARY.

    Links lead from FOLDER, where the page is kept, to the logs.
    """
    figures: dict[str, Figure] = {}
    parts = [_comparison(stories, figures)] if len(stories) > 1 else []
    runs = "".join(_run(run, number, folder, figures) for number, run in enumerate(stories))
    parts.append(f'<div class="runs">{runs}</div>')
    return _PAGE.substitute(
        title=_text("fleetrun: " + ", ".join(run.name for run in stories)),
        width="88em" if len(stories) > 1 else "64em",
        count=len(stories),
        body="\n".join(parts),
        library=library.replace("</script", "<\\/script"),
        # A < could end the element.
        figures=json.dumps(figures).replace("<", "\\u003c"),
    )


def _run(run: RunHistory, number: int, folder: str, figures: dict[str, Figure]) -> str:
    """Return all about one run; its charts go to FIGURES."""
    letter = "AB"[number]

    def chart(title: str, name: str, figure: Figure | None) -> str:
        if figure is None:
            return ""
        key = f"{name}-{letter}"
        figures[key] = figure
        return f'<h2>{title}</h2><div class="card"><div id="{key}"></div></div>'

    return "".join(
        (
            f'<div class="run" id="run-{letter}">',
            _head(run),
            _cause(run, folder),
            chart("Processes", "timeline", charts.timeline(run)),
            _moments(run),
            chart("Loss", "loss", charts.losses([run])),
            chart("Steps", "steps", charts.steps([run])),
            *(
                chart(used.title, f"use-{index}", charts.use(used))
                for index, used in enumerate(run.uses)
            ),
            chart("Most memory held", "memory", charts.memory(run)),
            _strategy(run),
            chart("Buckets of gradients", "buckets", charts.buckets(run)),
            *(
                chart(
                    f"Where a step goes: {_text(trace.reported())}",
                    f"step-{index}",
                    charts.step(trace),
                )
                for index, trace in enumerate(run.traces)
            ),
            _facts(run),
            _logs(run, folder),
            "</div>",
        )
    )


def _head(run: RunHistory) -> str:
    if run.exit_code is None:
        word, kind = "no end is recorded: it runs, or its launcher was killed", "open"
    elif run.exit_code:
        word, kind = f"{run.verdict} (exit code {run.exit_code})", "bad"
    else:
        word, kind = run.verdict or "all processes finished", ""
    shown = "".join(f"<div><b>{_text(value)}</b>{name}</div>" for name, value in numbers(run))
    return (
        f'<h1>{_text(run.name)}</h1><span class="verdict {kind}">{_text(word)}</span>'
        f'<div class="numbers">{shown}</div>'
    )


def numbers(run: RunHistory) -> list[tuple[str, str]]:
    """Return what people ask of a run first."""
    began = datetime.fromtimestamp(run.began, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    speeds = [speed for curve in run.curves if (speed := curve.steps_per_second()) is not None]
    final = [loss for curve in run.curves for loss in curve.losses[-1:] if loss is not None]
    peaks = [bar.peak_bytes for bar in run.bars if bar.peak_bytes]
    found = [
        ("began (UTC)", began),
        ("duration", duration(run.seconds)),
        ("processes", str(len({bar.label for bar in run.bars}))),
        ("hosts", str(len(run.hosts) or 1)),
        ("attempts", str(run.attempts)),
    ]
    if speeds:
        found.append(("steps a second", f"{sorted(speeds)[len(speeds) // 2]:.3g}"))
    if final:
        found.append(("last loss", f"{final[0]:.4g}"))
    if peaks:
        found.append(("most memory of a process", f"{max(peaks) / (1 << 20):.0f} MiB"))
    return found


def _cause(run: RunHistory, folder: str) -> str:
    """Return why the run ended badly, as its report has it."""
    report = run.report
    if report is None or not run.exit_code:
        return ""
    lines = [f"<p><b>{_text(report.outcome)}</b></p>"]
    culprit = report.culprit
    if culprit is not None:
        if culprit.kind:
            lines.append(f"<p>{_text(culprit.kind)}: {_text(culprit.message)}</p>")
        if culprit.remedy:
            lines.append(f"<p>{_text(culprit.remedy)}</p>")
        words = culprit.stack or "\n".join(culprit.last_words)
        if words:
            lines.append(f"<pre>{html.escape(visible_lines(words))}</pre>")
        # Each attempt has one that failed first; the report is about the last of them.
        firsts = [(bar.attempt, bar.logs) for bar in run.bars if bar.kind == FIRST]
        _, logs = max(firsts, default=(0, ()))
        for log, name in zip(logs, ("Its log", "Its standard error"), strict=False):
            lines.append(f"<p>{_link(log, folder, name)}</p>")
    lines += [f"<p>{_text(one)}</p>" for one in report.evidence]
    earlier = enumerate(report.earlier)
    lines += [f"<p>Attempt {attempt}: {_text(one)}</p>" for attempt, one in earlier]
    return f'<h2>Cause</h2><div class="card" id="cause">{"".join(lines)}</div>'


def _moments(run: RunHistory) -> str:
    if not run.moments:
        return ""
    rows = [(f"{one.at:.1f} s", one.what, one.text) for one in run.moments[:_MOST_MOMENTS]]
    more = len(run.moments) - len(rows)
    tail = f"<p>and {more} more, in events.jsonl</p>" if more > 0 else ""
    return f'<h2>Events</h2><div class="card">{_table(("at", "what", ""), rows)}{tail}</div>'


def _strategy(run: RunHistory) -> str:
    """Return what was asked of the strategy, and what of it was in effect."""
    if not run.fields:
        return ""
    rows = "".join(
        f'<tr class="{_text(one.status)}"><td>{_text(one.name)}</td><td>{_text(one.asked)}</td>'
        f"<td>{_text(one.in_effect)}</td><td>{_text(one.status.replace('_', ' '))}</td>"
        f"<td>{_text(one.why)}</td></tr>"
        for one in run.fields
    )
    heads = "".join(f"<th>{head}</th>" for head in ("field", "asked", "in effect", "", "why"))
    return f'<h2>Strategy</h2><div class="card"><table><tr>{heads}</tr>{rows}</table></div>'


def _facts(run: RunHistory) -> str:
    if not run.facts:
        return ""
    return f'<h2>Where it came from</h2><div class="card">{_table((), run.facts)}</div>'


def _logs(run: RunHistory, folder: str) -> str:
    links = "".join(
        f"<div>{_link(log, folder, f'{bar.label}{stream}{again}')}</div>"
        for bar in run.bars
        for again in (f", attempt {bar.attempt}" if bar.attempt else "",)
        for log, stream in zip(bar.logs, ("", " stderr"), strict=False)
    )
    return f'<h2>Logs</h2><div class="card logs">{links}</div>'


def _comparison(stories: Sequence[RunHistory], figures: dict[str, Figure]) -> str:
    """Return the two STORIES beside each other: numbers, what differs, losses and steps."""
    first, second = stories
    rows = []
    for pairs in (
        [dict(numbers(run)) for run in stories],
        [{f"strategy: {one.name}": one.in_effect for one in run.fields} for run in stories],
        [dict(run.facts) for run in stories],
    ):
        for name in dict.fromkeys((*pairs[0], *pairs[1])):
            mine, theirs = (pair.get(name, "-") for pair in pairs)
            if mine != theirs:
                rows.append((name, mine, theirs))
    parts = [
        f"<h1>A: {_text(first.name)}<br>B: {_text(second.name)}</h1>",
        '<h2>What differs</h2><div class="card" id="differs">',
        _table(("", "A", "B"), rows),
        "</div>",
    ]
    for title, name, figure in (
        ("Loss of both", "loss-both", charts.losses(stories)),
        ("Steps of both", "steps-both", charts.steps(stories)),
    ):
        if figure is not None:
            figures[name] = figure
            parts.append(f'<h2>{title}</h2><div class="card"><div id="{name}"></div></div>')
    return "".join(parts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(one)}</th>" for one in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if heads else ''}{body}</table>"


def _link(path: str, folder: str, text: str) -> str:
    from urllib.parse import quote  # only here

    return f'<a href="{html.escape(quote(os.path.relpath(path, folder)))}">{_text(text)}</a>'


def _text(said: str) -> str:
    return html.escape(visible(said))
