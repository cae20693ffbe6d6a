"""The sections of a page about a run, and the page of one run, or of two, as one file."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from fleetrun.commands.report import charts, words
from fleetrun.commands.report.history import FIRST, RunHistory
from fleetrun.text import format_duration, format_size, visible, visible_lines

_MOST_MOMENTS = 200
_Link = Callable[[str, str], str]


def page(stories: Sequence[RunHistory], folder: str) -> str:
    """Return the page of one or two STORIES.

    Links to logs are relative to FOLDER, where the page is kept.
    """

    def link(path: str, text: str) -> str:
        return f'<a href="{html.escape(quote(os.path.relpath(path, folder)))}">{escaped(text)}</a>'

    drawn: dict[str, dict[str, Any]] = {}
    parts = [comparison(stories)] if len(stories) > 1 else []
    if len(stories) > 1:
        drawn |= {f"both-{name}": chart for name, chart in charts.of_curves(stories).items()}
    runs = []
    for letter, run in zip("AB", stories, strict=False):
        own = {f"{letter}-{name}": chart for name, chart in charts.of_run(run).items()}
        drawn |= own
        shown = "".join(sections(run, link, own, letter).values()) + _logs(run, link)
        runs.append(f'<div class="run" id="run-{letter}">{shown}</div>')
    parts.append(f'<div class="runs">{"".join(runs)}</div>')
    # No text may end the script.
    data = json.dumps(drawn, allow_nan=False).replace("<", "\\u003c")
    return Template(part("page.html")).substitute(
        title=escaped(", ".join(f"{title(run)}: {result(run)[0]}" for run in stories)),
        width="88em" if len(stories) > 1 else "64em",
        style=part("page.css"),
        script=f"{part('chart.js')}{words.script()}\ndraw(document, {data});",
        body="\n".join(parts),
    )


def part(name: str) -> str:
    """Return the file NAME, a part of pages."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def sections(
    run: RunHistory, link: _Link, drawn: Iterable[str], letter: str = "A"
) -> dict[str, str]:
    """Return the sections of a page about RUN, with boxes for the charts DRAWN, by topic."""

    def chart(title: str, name: str) -> str:
        return _chart(title, f"{letter}-{name}") if f"{letter}-{name}" in drawn else ""

    verdict = result(run)[0]
    told = {run.verdict, verdict}
    shown = "".join(f"<div><b>{escaped(value)}</b>{name}</div>" for name, value in numbers(run))
    head = (
        f'<h1>{escaped(title(run))}</h1><span class="verdict {result(run)[1]}">{escaped(verdict)}'
        f'</span><div class="numbers">{shown}</div>{_cause(run, link, told)}'
    )
    progress = (
        chart("Processes", "processes")
        + _moments(run, told)
        + chart("Ranks over time", "maps")
        + chart("Loss", "loss")
        + chart("Steps", "steps")
    )
    return {"head": head, "progress": progress, "origin": _strategy(run) + _facts(run)}


def _chart(title: str, name: str) -> str:
    return f'<h2>{title}</h2><div class="card" data-chart="{name}"></div>'


def title(run: RunHistory) -> str:
    """Return the title of the run: its script, and when it began."""
    began = datetime.fromtimestamp(run.began, timezone.utc).strftime("%Y-%m-%d %H:%M")
    return f"{run.script or run.name}, {began} UTC"


def result(run: RunHistory) -> tuple[str, str]:
    """Return how the run ended, and the style class of that."""
    if run.exit_code is None:
        return "running" if run.is_running else "its launcher was killed", "open"
    if run.exit_code:
        return f"{run.verdict} (exit code {run.exit_code})", "bad"
    return run.verdict or "all processes finished", ""


def numbers(run: RunHistory) -> list[tuple[str, str]]:
    """Return the key figures of a run."""
    printed = (curve.steps_per_second() for curve in run.curves)
    speeds = run.speeds or [speed for speed in printed if speed is not None]
    final = [loss for curve in run.curves for loss in curve.losses[-1:] if loss is not None]
    peaks = [bar.peak_bytes for bar in run.bars if bar.peak_bytes]
    throughputs = [curve.throughput for curve in run.curves if curve.throughput]
    figures = [
        ("duration", format_duration(run.seconds)),
        ("processes", str(len({bar.label for bar in run.bars}))),
        ("hosts", str(len(run.hosts)) if len(run.hosts) > 1 else ""),
        ("attempts", str(run.attempts) if run.attempts > 1 else ""),
        ("steps per second", f"{sorted(speeds)[len(speeds) // 2]:.3g}" if speeds else ""),
        ("last throughput", throughputs[0] if throughputs else ""),
        ("last loss", f"{final[0]:.4g}" if final else ""),
        ("peak memory of a process", f"{max(peaks) / (1 << 20):.0f} MiB" if peaks else ""),
    ]
    return [(name, value) for name, value in figures if value]


def _cause(run: RunHistory, link: _Link, told: set[str]) -> str:
    """Return why the run failed, by its report, without what was TOLD before."""
    report = run.report
    if report is None or not run.exit_code:
        return ""
    lines = []

    def say(text: str, shown: str = "{}") -> None:
        if text and text not in told:
            told.add(text)
            lines.append(f"<p>{shown.format(escaped(text))}</p>")

    say(report.outcome, "<b>{}</b>")
    culprit = report.culprit
    if culprit is not None:
        say(f"{culprit.class_}: {culprit.message}" if culprit.class_ else "")
        say(culprit.remedy)
        last = culprit.stack or "\n".join(culprit.last_words)
        if last:
            lines.append(f"<pre>{html.escape(visible_lines(last))}</pre>")
        # The report is about the last attempt's first failure.
        firsts = [(bar.attempt, bar.logs) for bar in run.bars if bar.kind == FIRST]
        _, logs = max(firsts, default=(0, ()))
        for log, name in zip(logs, ("Its log", "Its standard error"), strict=False):
            lines.append(f"<p>{link(log, name)}</p>")
    for text in report.evidence:
        say(text)
    for attempt, outcome in enumerate(report.earlier):
        say(f"Attempt {attempt}: {outcome}")
    return f'<h2>Cause</h2><div class="card" id="cause">{"".join(lines)}</div>'


def _moments(run: RunHistory, told: set[str]) -> str:
    """Return what happened when, without the texts of what was TOLD before."""
    if not run.moments:
        return ""
    rows = [
        (f"{moment.at:.1f} s", moment.what, "" if moment.text in told else moment.text)
        for moment in run.moments[:_MOST_MOMENTS]
    ]
    more = len(run.moments) - len(rows)
    tail = f"<p>and {more} more, in events.jsonl</p>" if more > 0 else ""
    return f'<h2>Events</h2><div class="card">{_table(("at", "what", ""), rows)}{tail}</div>'


def _strategy(run: RunHistory) -> str:
    """Return the requested strategy and what of it was in effect."""
    if not run.fields:
        return ""
    rows = "".join(
        f'<tr class="{escaped(field.status)}"><td>{escaped(field.name)}</td>'
        f"<td>{escaped(field.asked)}</td><td>{escaped(field.in_effect)}</td>"
        f"<td>{escaped(field.status.replace('_', ' '))}</td><td>{escaped(field.why)}</td></tr>"
        for field in run.fields
    )
    heads = "".join(f"<th>{head}</th>" for head in ("field", "asked", "in effect", "", "why"))
    return f'<h2>Strategy</h2><div class="card"><table><tr>{heads}</tr>{rows}</table></div>'


def _facts(run: RunHistory) -> str:
    buckets = ", ".join(format_size(number) for number in run.buckets)
    facts = [*run.facts, *([("buckets of gradients", buckets)] if buckets else [])]
    return f'<h2>Where it came from</h2><div class="card">{_table((), facts)}</div>'


def _logs(run: RunHistory, link: _Link) -> str:
    links = "".join(
        f"<div>{link(log, f'{bar.title}{stream}{attempt}')}</div>"
        for bar in run.bars
        for attempt in (f", attempt {bar.attempt}" if bar.attempt else "",)
        for log, stream in zip(bar.logs, ("", " stderr"), strict=False)
    )
    return f'<h2>Logs</h2><div class="card logs">{links}</div>'


def comparison(stories: Sequence[RunHistory]) -> str:
    """Return the two STORIES side by side: key figures, differences, losses and steps."""
    rows: list[Sequence[str]] = []
    for pairs in (
        [dict(numbers(run)) for run in stories],
        [{f"strategy: {field.name}": field.in_effect for field in run.fields} for run in stories],
        [dict(run.facts) for run in stories],
    ):
        for name in dict.fromkeys((*pairs[0], *pairs[1])):
            values = [pair.get(name, "-") for pair in pairs]
            if values[0] != values[1]:
                rows.append((name, *values))
    heads = "<br>".join(
        f"{side}: {escaped(title(run))}" for side, run in zip("AB", stories, strict=True)
    )
    drawn = charts.of_curves(stories)
    titles = {"loss": "Loss of both", "steps": "Steps of both"}
    return (
        f'<h1>{heads}</h1><h2>What differs</h2><div class="card" id="differs">'
        f"{_table(('', 'A', 'B'), rows)}</div>"
        + "".join(_chart(titles[name], f"both-{name}") for name in drawn)
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escaped(title)}</th>" for title in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if heads else ''}{body}</table>"


def escaped(text: str) -> str:
    """Return TEXT of any origin as text of a page."""
    return html.escape(visible(text))
