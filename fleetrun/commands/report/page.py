"""Writes a run, or two side by side, as one HTML file that needs no network."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from string import Template
from urllib.parse import quote

from fleetrun.commands.report import charts, words
from fleetrun.commands.report.history import FIRST, RunHistory
from fleetrun.conversion import duration
from fleetrun.plan.visible import visible, visible_lines

_MOST_MOMENTS = 200


def page(stories: Sequence[RunHistory], folder: str) -> str:
    """Return the page of one or two STORIES.

    Links to logs are relative to FOLDER, where the page is kept.
    """

    def link(path: str, text: str) -> str:
        return f'<a href="{html.escape(quote(os.path.relpath(path, folder)))}">{escaped(text)}</a>'

    parts = [comparison(stories)] if len(stories) > 1 else []
    runs = "".join(_run(run, number, link) for number, run in enumerate(stories))
    parts.append(f'<div class="runs">{runs}</div>')
    return Template(part("page.html")).substitute(
        title=escaped(", ".join(f"{title(run)}: {result(run)[0]}" for run in stories)),
        width="88em" if len(stories) > 1 else "64em",
        style=part("page.css"),
        script=f"{part('chart.js')}{words.script()}",
        body="\n".join(parts),
    )


def part(name: str) -> str:
    """Return the file NAME, a part of pages."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _chart(title: str, key: str, drawn: str | None) -> str:
    if drawn is None:
        return ""
    return f'<h2>{title}</h2><div class="card"><div id="{key}">{drawn}</div></div>'


def _run(run: RunHistory, number: int, link: Callable[[str, str], str]) -> str:
    """Return everything about one run."""
    parts = sections(run, number, link, _uses(run, number))
    return f'<div class="run" id="run-{"AB"[number]}">{"".join(parts.values())}</div>'


def _uses(run: RunHistory, number: int) -> str:
    return "".join(
        _chart(used.title, f"use-{index}-{'AB'[number]}", charts.use(used))
        for index, used in enumerate(run.uses)
    )


def sections(
    run: RunHistory, number: int, link: Callable[[str, str], str], uses: str = ""
) -> dict[str, str]:
    """Return the sections of a page about RUN, by topic; USES are the charts of its usage."""

    def chart(title: str, name: str, drawn: str | None) -> str:
        return _chart(title, f"{name}-{'AB'[number]}", drawn)

    return {
        "head": _head(run) + _cause(run, link),
        "progress": "".join(
            (
                chart("Loss", "loss", charts.losses([run])),
                chart("Steps", "steps", charts.steps([run])),
                _moments(run),
                chart("Processes", "timeline", charts.timeline(run)),
            )
        ),
        "uses": uses,
        "origin": "".join(
            (
                # Charts over time show the peak, too.
                chart("Peak memory", "memory", None if run.uses else charts.memory(run)),
                _strategy(run),
                chart("Buckets of gradients", "buckets", charts.buckets(run)),
                _facts(run),
            )
        ),
        "logs": _logs(run, link),
    }


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


def _head(run: RunHistory) -> str:
    word, kind = result(run)
    shown = "".join(f"<div><b>{escaped(value)}</b>{name}</div>" for name, value in numbers(run))
    return (
        f'<h1>{escaped(title(run))}</h1><span class="verdict {kind}">{escaped(word)}</span>'
        f'<div class="numbers">{shown}</div>'
    )


def numbers(run: RunHistory) -> list[tuple[str, str]]:
    """Return the key figures of a run."""
    printed = (curve.steps_per_second() for curve in run.curves)
    speeds = run.speeds or [speed for speed in printed if speed is not None]
    final = [loss for curve in run.curves for loss in curve.losses[-1:] if loss is not None]
    peaks = [bar.peak_bytes for bar in run.bars if bar.peak_bytes]
    figures = [
        ("duration", duration(run.seconds)),
        ("processes", str(len({bar.label for bar in run.bars}))),
    ]
    figures += [
        (name, str(count))
        for name, count in (("hosts", len(run.hosts)), ("attempts", run.attempts))
        if count > 1
    ]
    if speeds:
        figures.append(("steps per second", f"{sorted(speeds)[len(speeds) // 2]:.3g}"))
    figures += [("last throughput", curve.throughput) for curve in run.curves if curve.throughput][
        :1
    ]
    if final:
        figures.append(("last loss", f"{final[0]:.4g}"))
    if peaks:
        figures.append(("peak memory of a process", f"{max(peaks) / (1 << 20):.0f} MiB"))
    return figures


def _cause(run: RunHistory, link: Callable[[str, str], str]) -> str:
    """Return why the run failed, by its report."""
    report = run.report
    if report is None or not run.exit_code:
        return ""
    lines = [f"<p><b>{escaped(report.outcome)}</b></p>"]
    culprit = report.culprit
    if culprit is not None:
        if culprit.class_:
            lines.append(f"<p>{escaped(culprit.class_)}: {escaped(culprit.message)}</p>")
        if culprit.remedy:
            lines.append(f"<p>{escaped(culprit.remedy)}</p>")
        words = culprit.stack or "\n".join(culprit.last_words)
        if words:
            lines.append(f"<pre>{html.escape(visible_lines(words))}</pre>")
        # The report is about the last attempt's first failure.
        firsts = [(bar.attempt, bar.logs) for bar in run.bars if bar.kind == FIRST]
        _, logs = max(firsts, default=(0, ()))
        for log, name in zip(logs, ("Its log", "Its standard error"), strict=False):
            lines.append(f"<p>{link(log, name)}</p>")
    lines += [f"<p>{escaped(text)}</p>" for text in report.evidence]
    earlier = enumerate(report.earlier)
    lines += [f"<p>Attempt {attempt}: {escaped(outcome)}</p>" for attempt, outcome in earlier]
    return f'<h2>Cause</h2><div class="card" id="cause">{"".join(lines)}</div>'


def _moments(run: RunHistory) -> str:
    if not run.moments:
        return ""
    shown = run.moments[:_MOST_MOMENTS]
    rows = [(f"{moment.at:.1f} s", moment.what, moment.text) for moment in shown]
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
    return f'<h2>Where it came from</h2><div class="card">{_table((), run.facts)}</div>'


def _logs(run: RunHistory, link: Callable[[str, str], str]) -> str:
    links = "".join(
        f"<div>{link(log, f'{bar.title}{stream}{attempt}')}</div>"
        for bar in run.bars
        for attempt in (f", attempt {bar.attempt}" if bar.attempt else "",)
        for log, stream in zip(bar.logs, ("", " stderr"), strict=False)
    )
    return f'<h2>Logs</h2><div class="card logs">{links}</div>'


def comparison(stories: Sequence[RunHistory]) -> str:
    """Return the two STORIES side by side: key figures, differences, losses and steps."""
    first, second = stories
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
    parts = [
        f"<h1>A: {escaped(title(first))}<br>B: {escaped(title(second))}</h1>",
        '<h2>What differs</h2><div class="card" id="differs">',
        _table(("", "A", "B"), rows),
        "</div>",
    ]
    parts += [
        _chart("Loss of both", "loss-both", charts.losses(stories)),
        _chart("Steps of both", "steps-both", charts.steps(stories)),
    ]
    return "".join(parts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escaped(title)}</th>" for title in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if heads else ''}{body}</table>"


def escaped(text: str) -> str:
    """Return TEXT of any origin as text of a page."""
    return html.escape(visible(text))
