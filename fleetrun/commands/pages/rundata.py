"""What a page shows of a run, as JSON: read from the files that the run has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from fleetrun.cli.argv import split
from fleetrun.commands.pages import series
from fleetrun.errors import FleetrunError
from fleetrun.rundir import eventfile, names, reading, strategyfiles
from fleetrun.rundir.eventfile import EventRecord
from fleetrun.rundir.reportfile import ReportRecord
from fleetrun.rundir.runs import LogRecord, Run
from fleetrun.text import format_duration, format_size, visible, visible_lines

# As JSON: strings, numbers, lists and objects.
Document = dict[str, Any]

_SHOWN = frozenset(
    (
        *("warning", "hung", "strategy_rejected", "source_failed", "peer_failed", "interrupted"),
        *("restarting", "recovered", "start_failed"),
    )
)
# How an attempt of a process ended; page.js has their colours.
WELL, FIRST, ALONG = "succeeded", "failed first", "stopped with it"
ALIVE, OPEN = "running", "end unknown"


def read(
    job_runs: Sequence[Run],
    *,
    link: Callable[[str], str] = lambda _: "",
    measured: series.Measured = series.measured,
    most_bytes: int = series.MOST_BYTES,
) -> Document:
    """Return all that a page shows of a job, whose hosts have left JOB_RUNS.

    LINK returns the address of a file, or nothing. The last MOST_BYTES of each log are searched for
    steps and losses. Times are in seconds since the job began.
    """
    first = job_runs[0]
    failed = next((run for run in job_runs if run.exit_code), first)
    running = {run.path for run in job_runs if run.is_running}
    events = sorted((e for run in job_runs for e in run.events), key=lambda event: event.time)
    began = min((run.started_at for run in job_runs if run.started_at is not None), default=0.0)
    last = events[-1].time if events else began
    last = time.time() if running and began else last
    manifest = reading.document(first.file(names.MANIFEST)) or {}
    outcome = "all processes finished" if failed.exit_code == 0 else "its launcher was killed"
    told = {"verdict": failed.verdict or ("running" if running else outcome)}
    logs = sorted(
        ((run, log) for run in job_runs for log in run.logs),
        key=lambda pair: (series.order(pair[1].label), pair[1].attempt),
    )
    curves = series.curves(job_runs, began, measured, most_bytes)
    culprits = [log.label for _, log in logs if log.has_failed]
    for event in events:
        for entry in reading.mappings(event.more.get("collectives")):
            culprits += reading.texts(entry.get("who"))
    sentences: set[str] = set(told.values())
    document: Document = {
        **told,
        "title": _title(first, began, manifest),
        "exit_code": failed.exit_code,
        "is_running": bool(running),
        # A rank may print something after the last event.
        "span": max(1e-3, last - began, *(curve.at[-1] for curve in curves)),
        "culprits": list(dict.fromkeys(culprits)),
        "numbers": _numbers(job_runs, events, last - began, curves),
        "cause": [*_cause(failed.report(), logs, link, sentences)] if failed.exit_code else [],
        "moments": [*_moments(events, began, sentences)],
        **_processes(job_runs, logs, began, last, running),
        **_maps(job_runs, began, last, measured, events),
        "lines": {name: [*series.lines(curves, name)] for name in ("loss", "steps")},
        "strategy": _strategy(events),
        "facts": [("run", first.name), *_facts(manifest), *_buckets(first)],
        "logs": [
            (f"{log.label}{stream}{f', attempt {log.attempt}' if log.attempt else ''}", link(path))
            for _, log in logs
            for path, stream in zip(log.paths, ("", " stderr"), strict=False)
        ],
    }
    return {key: _visible(value) for key, value in document.items()}


def _visible(node: Any) -> Any:  # noqa: ANN401 - JSON
    """Return NODE with control characters in its texts made visible."""
    match node:
        case str():
            return visible_lines(node)
        case dict():
            return {key: _visible(value) for key, value in node.items()}
        case list() | tuple():
            return [_visible(value) for value in node]
        case _:
            return node


def _title(run: Run, began: float, manifest: Mapping[str, Any]) -> str:
    """Return the title of RUN: its script, and when it began."""
    try:
        script = split(reading.texts(manifest.get("command"))).script
    except FleetrunError:
        script = None
    at = datetime.fromtimestamp(began, timezone.utc).strftime("%Y-%m-%d %H:%M")
    return f"{visible(script.name) if script else run.name}, {at} UTC"


def _numbers(
    job_runs: Sequence[Run],
    events: Sequence[EventRecord],
    seconds: float,
    curves: Sequence[series.Curve],
) -> list[tuple[str, str]]:
    """Return the key figures of a job."""
    speeds = sorted(series.speeds(job_runs, curves))
    final = [loss for curve in curves for loss in curve.losses[-1:] if loss is not None]
    peaks = [
        peak
        for event in events
        if (peak := reading.whole(event.more.get("peak_bytes"))) is not None
    ]
    throughputs = [curve.throughput for curve in curves if curve.throughput]
    hosts = 1 if job_runs[0].plan is None else len(job_runs[0].plan.nodes)
    attempts = max(run.attempt for run in job_runs) + 1
    figures = [
        ("duration", format_duration(max(seconds, 0.0))),
        ("processes", str(len({(run.path, log.process) for run in job_runs for log in run.logs}))),
        ("hosts", str(hosts) if hosts > 1 else ""),
        ("attempts", str(attempts) if attempts > 1 else ""),
        ("steps per second", f"{speeds[len(speeds) // 2]:.3g}" if speeds else ""),
        ("last throughput", throughputs[0] if throughputs else ""),
        ("last loss", f"{final[0]:.4g}" if final else ""),
        ("peak memory of a process", f"{max(peaks) / (1 << 20):.0f} MiB" if peaks else ""),
    ]
    return [(name, value) for name, value in figures if value]


def _cause(
    report: ReportRecord | None,
    logs: Sequence[tuple[Run, LogRecord]],
    link: Callable[[str], str],
    told: set[str],
) -> Iterable[tuple[str, str, str]]:
    """Yield why a job failed: the kind, text and address of each line that was not TOLD before."""
    if report is None:
        return
    texts = [("outcome", report.outcome)]
    culprit = report.culprit
    if culprit is not None:
        last = culprit.stack or "\n".join(culprit.last_words)
        exception = f"{culprit.class_}: {culprit.message}" if culprit.class_ else ""
        # A traceback ends with it.
        texts += [("", exception)] if exception not in last else []
        texts += [("", culprit.remedy), ("stack", last)]
    for kind, text in texts:
        if text and text not in told:
            told.add(text)
            yield kind, text, ""
    # The report is about the last attempt's first failure.
    firsts = [log for _, log in logs if log.has_failed]
    if culprit is not None and firsts:
        newest = max(firsts, key=lambda log: log.attempt)
        for path, name in zip(newest.paths, ("Its log", "Its standard error"), strict=False):
            yield "log", name, link(path)
    earlier = (f"Attempt {attempt}: {text}" for attempt, text in enumerate(report.earlier))
    for text in (*report.evidence, *earlier):
        if text not in told:
            told.add(text)
            yield "", text, ""


def _moments(
    events: Sequence[EventRecord], began: float, told: set[str]
) -> Iterable[tuple[float, str, str]]:
    """Yield when something happened, what, and its description, unless it was TOLD before."""
    for event in (event for event in events if event.event in _SHOWN):
        text = _description(event)
        yield round(event.time - began, 3), event.event, "" if text in told else text


def _description(event: EventRecord) -> str:
    """Return a short description of EVENT."""
    more = event.more
    if event.event == "hung":
        parts = [reading.text(e.get("text")) for e in reading.mappings(more.get("collectives"))]
        parts += [
            f"{names.listed(reading.texts(place.get('who')))}: {reading.text(place.get('where'))}"
            for place in reading.mappings(more.get("places"))
        ]
        return "; ".join((f"{more.get('seconds')} s without a sign of life", *parts))
    if event.event == "strategy_rejected":
        return " ".join(reading.texts(more.get("faults")))
    texts = (reading.text(more.get(key)) for key in ("text", "why", "what", "signal"))
    return next(filter(None, texts), f"attempt {event.attempt}")


def _processes(
    job_runs: Sequence[Run],
    logs: Sequence[tuple[Run, LogRecord]],
    began: float,
    last: float,
    running: set[str],
) -> Document:
    """Return the row of each process, and its attempts: row, begin, end, how it ended, details."""
    axes = {run.path: run.axes() for run in job_runs}
    rows: dict[str, int] = {}
    spans = []
    for run, log in logs:
        topology = axes[run.path]
        place = topology.place(log.rank) if topology is not None and log.rank is not None else ""
        title = f"{log.label} ({place})" if place else log.label
        end = last if log.ended_at is None else log.ended_at
        kind, how = _end(log, is_running=run.path in running)
        host = f" on {run.host}" if len(job_runs) > 1 and run.host else ""
        tip = f"{title}{host}, attempt {log.attempt}: {how} after {end - log.started_at:.1f} s"
        times = round(log.started_at - began, 3), round(end - began, 3)
        spans.append((rows.setdefault(title, len(rows)), *times, kind, tip))
    return {"rows": list(rows), "spans": spans}


def _end(log: LogRecord, *, is_running: bool) -> tuple[str, str]:
    """Return how the attempt of LOG ended, as a kind and in words."""
    if log.ended_at is None:
        return (ALIVE, "running") if is_running else (OPEN, "no end is recorded")
    if log.code == 0:
        return WELL, "exit code 0"
    how = f"killed by {log.signal}" if log.signal else f"exit code {log.code}"
    return FIRST if log.has_failed else ALONG, how


def _maps(
    job_runs: Sequence[Run],
    began: float,
    last: float,
    measured: series.Measured,
    events: Sequence[EventRecord],
) -> Document:
    """Return the heat maps, and the title of the one to open first."""
    maps = [*series.usage(job_runs, began, measured), *series.in_collectives(job_runs, began, last)]
    has_hung = any(event.event == "hung" for event in events)
    return {"maps": maps, "first": series.COLLECTIVES if has_hung else ""}


def _strategy(events: Sequence[EventRecord]) -> list[tuple[str, ...]]:
    """Return the requested fields of the strategy, and what of them was in effect."""
    reports = [event for event in events if event.event == "strategy_report"]
    return [
        (field.name, field.asked, field.in_effect, field.status, field.why)
        for field in (eventfile.verdicts(reports[-1]) if reports else ())
    ]


def _buckets(run: Run) -> list[tuple[str, str]]:
    evidence = strategyfiles.parse_evidence(run.evidence())
    counts = None if evidence is None else evidence.counts
    sizes = [] if counts is None else [format_size(number) for number in counts.bucket_bytes]
    return [("buckets of gradients", ", ".join(sizes))] if sizes else []


def _facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the origin of the run by MANIFEST: versions, git, command, settings."""
    git = reading.mapping(manifest.get("git"))
    dirty = " and changes" if git.get("dirty") else ""
    facts = [
        ("command", " ".join(("fleetrun", *reading.texts(manifest.get("command"))))),
        ("folder", reading.text(manifest.get("cwd"))),
        *reading.mapping(manifest.get("versions")).items(),
        ("git", f"{reading.text(git.get('commit'))}{dirty}"),
        *(
            (f"--{reading.text(setting.get('name'))}", setting.get("value"))
            for setting in reading.mappings(manifest.get("settings"))
            if setting.get("source") != "default"
        ),
    ]
    return [(name, text) for name, value in facts if (text := reading.text(value))]
