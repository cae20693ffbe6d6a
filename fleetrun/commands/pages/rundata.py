"""What a page shows of a run, as JSON: read from the files that the run has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from fleetrun.commands.pages import series
from fleetrun.rundir import eventfile, names, progress, reading
from fleetrun.rundir.eventfile import EventRecord
from fleetrun.rundir.reportfile import ReportRecord
from fleetrun.rundir.runs import LogRecord, Run
from fleetrun.text import format_duration, visible

# As JSON: strings, numbers, lists and objects.
Document = dict[str, Any]

# How an attempt of a process ended; chart.js has their colours.
_WELL, _FIRST, _ALONG = "succeeded", "failed first", "stopped with it"
_ALIVE, _OPEN = "running", "end unknown"


def read(
    job_runs: Sequence[Run],
    *,
    link: Callable[[str], str] = lambda _: "",
    most_bytes: int = 16 << 20,
) -> Document:
    """Return all that a page shows of a job, whose hosts have left JOB_RUNS.

    LINK returns the address of a file, or nothing. The last MOST_BYTES of each log are searched for
    steps and losses. Times are in seconds since the job began.
    """
    first = job_runs[0]
    failed = next((run for run in job_runs if run.exit_code), first)
    is_running = any(run.is_running for run in job_runs)
    events = sorted((e for run in job_runs for e in run.events), key=lambda event: event.time)
    began = min((run.started_at for run in job_runs if run.started_at is not None), default=0.0)
    last = time.time() if is_running and began else events[-1].time if events else began
    outcome = "all processes finished" if failed.exit_code == 0 else "its launcher was killed"
    verdict = failed.verdict or ("running" if is_running else outcome)
    logs = sorted(
        ((run, log) for run in job_runs for log in run.logs),
        key=lambda pair: (series.order(pair[1].label), pair[1].attempt),
    )
    curves = series.curves(job_runs, began, most_bytes)
    culprits = [log.label for _, log in logs if log.has_failed]
    for event in events:
        for entry in event.more.get("collectives") or ():
            culprits += entry.get("who") or ()
    at = datetime.fromtimestamp(began, timezone.utc).strftime("%Y-%m-%d %H:%M")
    return {
        "verdict": visible(verdict),
        "title": f"{visible(names.job_name(first.name))}, {at} UTC",
        "exit_code": failed.exit_code,
        "is_running": is_running,
        # A rank may print something after the last event.
        "span": max(1e-3, last - began, *(curve.at[-1] for curve in curves)),
        "culprits": list(dict.fromkeys(culprits)),
        "numbers": _numbers(job_runs, events, last - began, curves),
        "cause": [*_cause(failed.report(), logs, link, verdict)],
        **_processes(job_runs, logs, began, last),
        "maps": [*series.usage(job_runs, began), *series.in_collectives(job_runs, began, last)],
        # The map to open.
        "first": series.COLLECTIVES if any(event.event == "hung" for event in events) else "",
        "lines": {name: [*series.lines(curves, name)] for name in ("loss", "steps")},
        # The requested fields, and what of them was in effect.
        "strategy": [
            (verdict.name, verdict.asked, verdict.in_effect, verdict.status, verdict.why)
            for verdict in eventfile.verdicts(events)
        ],
        "facts": [("run", first.name), *_facts(reading.document(first.file(names.MANIFEST)) or {})],
        "logs": [
            (log.title(stream), link(path))
            for _, log in logs
            for path, stream in zip(log.paths, ("", " stderr"), strict=False)
        ],
    }


def _numbers(
    job_runs: Sequence[Run],
    events: Sequence[EventRecord],
    seconds: float,
    curves: Sequence[series.Curve],
) -> list[tuple[str, str]]:
    """Return the key figures of a job."""
    # The times of heartbeats, or else those of the output.
    beats = [run.heartbeat(log) for run in job_runs for log in run.logs]
    points = [beat.points for beat in beats if beat is not None and beat.points]
    points += [tuple(zip(c.at, c.steps, strict=True)) for c in curves if c.has_steps and not points]
    speeds = sorted(filter(None, map(progress.steps_per_second, points)))
    final = [loss for curve in curves for loss in curve.losses[-1:] if loss is not None]
    peaks = [event.more.get("peak_bytes") or 0 for event in events]
    hosts = 1 if job_runs[0].plan is None else len(job_runs[0].plan.nodes)
    attempts = max(run.attempt for run in job_runs) + 1
    figures = [
        ("duration", format_duration(max(seconds, 0.0))),
        ("processes", str(len({(run.path, log.process) for run in job_runs for log in run.logs}))),
        ("hosts", str(hosts) if hosts > 1 else ""),
        ("attempts", str(attempts) if attempts > 1 else ""),
        ("steps per second", f"{speeds[len(speeds) // 2]:.3g}" if speeds else ""),
        ("last loss", f"{final[0]:.4g}" if final else ""),
        ("peak memory of a process", f"{max(peaks) / (1 << 20):.0f} MiB" if any(peaks) else ""),
    ]
    return [(name, value) for name, value in figures if value]


def _cause(
    report: ReportRecord | None,
    logs: Sequence[tuple[Run, LogRecord]],
    link: Callable[[str], str],
    verdict: str,
) -> Iterable[tuple[str, str, str]]:
    """Yield why a job failed: the kind, text and address of each line, but not VERDICT again."""
    if report is None or not report.exit_code:
        return
    texts = [("outcome", report.outcome)]
    culprit = report.culprit
    if culprit is not None:
        last = culprit.stack or "\n".join(culprit.last_words)
        exception = f"{culprit.class_}: {culprit.message}" if culprit.class_ else ""
        # A traceback ends with it.
        texts += [("", "" if exception in last else exception), ("", culprit.remedy)]
        texts.append(("stack", last))
    texts += [("", text) for text in report.evidence]
    texts += [("", f"Attempt {n}: {text}") for n, text in enumerate(report.earlier)]
    # A sentence stands once.
    kinds: dict[str, str] = {}
    for kind, text in texts:
        kinds.setdefault(text, kind)
    yield from ((kind, text, "") for text, kind in kinds.items() if text not in {"", verdict})
    # The report is about the last attempt's first failure.
    firsts = [log for _, log in logs if log.has_failed]
    if culprit is not None and firsts:
        newest = max(firsts, key=lambda log: log.attempt)
        for path, name in zip(newest.paths, ("Its log", "Its standard error"), strict=False):
            yield "log", name, link(path)


def _processes(
    job_runs: Sequence[Run],
    logs: Sequence[tuple[Run, LogRecord]],
    began: float,
    last: float,
) -> Document:
    """Return the row of each process, and its attempts: row, begin, end, how it ended, details."""
    axes = {run.path: run.axes() for run in job_runs}
    running = {run.path for run in job_runs if run.is_running}
    rows: dict[str, int] = {}
    spans = []
    for run, log in logs:
        topology = axes[run.path]
        place = topology.place(log.rank) if topology is not None and log.rank is not None else ""
        title = f"{log.label} ({place})" if place else log.label
        end = last if log.ended_at is None else log.ended_at
        kind, how = _OPEN, "no end is recorded"
        if log.ended_at is None and run.path in running:
            kind, how = _ALIVE, "running"
        elif log.ended_at is not None:
            kind = _WELL if log.code == 0 else _FIRST if log.has_failed else _ALONG
            how = f"killed by {log.signal}" if log.signal else f"exit code {log.code}"
        host = f" on {run.host}" if len(job_runs) > 1 and run.host else ""
        tip = f"{title}{host}, attempt {log.attempt}: {how} after {end - log.started_at:.1f} s"
        times = round(log.started_at - began, 3), round(end - began, 3)
        spans.append((rows.setdefault(title, len(rows)), *times, kind, tip))
    return {"rows": list(rows), "spans": spans}


def _facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the origin of the run by MANIFEST: versions, git, command, settings."""
    git = manifest.get("git") or {}
    facts = [
        ("command", " ".join(("fleetrun", *(manifest.get("command") or ())))),
        ("folder", manifest.get("cwd")),
        *(manifest.get("versions") or {}).items(),
        ("git", f"{reading.text(git.get('commit'))}{' and changes' if git.get('dirty') else ''}"),
        *(
            (f"--{reading.text(setting.get('name'))}", setting.get("value"))
            for setting in manifest.get("settings") or ()
            if setting.get("source") != "default"
        ),
    ]
    return [(name, text) for name, value in facts if (text := reading.text(value))]
