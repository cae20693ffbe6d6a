"""Collects what the files of a run record for a page."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fleetrun.cli.argv import split
from fleetrun.errors import FleetrunError
from fleetrun.model import FieldVerdict
from fleetrun.rundir import (
    eventfile,
    flightfile,
    metricsfile,
    names,
    outputtimes,
    progress,
    rankfile,
    reading,
    reportfile,
    strategyfiles,
)
from fleetrun.rundir.runs import LogRecord, Run

# The samples of a rank or a GPU, by moment.
_Seen = dict[int, tuple[float | None, ...]]

# The logs that are searched for steps and losses, and the bytes read of each.
_MOST_LOGS, _MOST_BYTES = 8, 16 << 20
# The pieces that are read of a longer log.
_PIECES = 64
# The most columns of a chart.
_MOST_POINTS = 2000
# The moments of a picture, and its cells, all of which a browser gets.
_LEAST_MOMENTS, _MOST_MOMENTS, _MOST_VALUES = 16, 240, 1 << 16
# The ranks whose collectives are read.
_MOST_RANKS = 256
_GIB = 1 << 30
_MIB_EACH = 1024
_SHOWN = frozenset(
    (
        *("warning", "hung", "strategy_rejected", "source_failed", "peer_failed", "interrupted"),
        *("restarting", "recovered", "start_failed"),
    )
)
_CPU, _MEMORY = ("CPU use", "% of one"), ("Memory", "GiB")
_GPU, _GPU_MEMORY = ("GPU use", "%"), ("GPU memory", "GiB")
_STEP = ("Step time", "s")
COLLECTIVES = "Time in collectives"
# The columns of a heat map.
_MOST_COLUMNS = 120
_KINDS = (_STEP, _CPU, _MEMORY, _GPU, _GPU_MEMORY)
WELL, FIRST, ALONG = "succeeded", "failed first", "stopped with it"
ALIVE, OPEN = "running", "end unknown"


class AttemptSpan(NamedTuple):
    """One attempt of a process: seconds since the job began, and how it ended."""

    label: str
    attempt: int
    begin: float
    end: float
    kind: str
    how: str
    host: str
    # Standard error may have a second file.
    logs: tuple[str, ...]
    peak_bytes: int | None = None
    # Its place in fleet's topology: dp 1, mp 0.
    place: str = ""

    @property
    def title(self) -> str:
        """The label with its place."""
        return f"{self.label} ({self.place})" if self.place else self.label


class Moment(NamedTuple):
    """Something that happened, in seconds since the job began."""

    at: float
    what: str
    text: str


class Curve(NamedTuple):
    """What a rank printed: steps, when (seconds since the job began), and losses (None: none).

    If it printed no steps, its losses are numbered, and `has_steps` is false.
    """

    label: str
    steps: tuple[int, ...]
    at: tuple[float, ...]
    losses: tuple[float | None, ...]
    has_steps: bool = True
    # Tokens, samples or images a second, as last printed; empty if never.
    throughput: str = ""

    def steps_per_second(self) -> float | None:
        """Return the steps per second by the reported or printed steps."""
        points = tuple(zip(self.at, self.steps, strict=True))
        return progress.steps_per_second(points) if self.has_steps else None


class Use(NamedTuple):
    """What rows (ranks, GPUs) used over time: `values[row][moment]`; None: not measured."""

    title: str
    unit: str
    rows: tuple[str, ...]
    # Seconds since the job began.
    at: tuple[float, ...]
    values: tuple[tuple[float | None, ...], ...]


class RunHistory(NamedTuple):
    """Everything that a page shows of a run."""

    name: str
    # The script's file name; empty if unknown.
    script: str
    verdict: str
    # None: it runs, or its launcher was killed.
    exit_code: int | None
    # Seconds since 1970, and that it took.
    began: float
    seconds: float
    hosts: tuple[str, ...]
    bars: tuple[AttemptSpan, ...]
    moments: tuple[Moment, ...]
    curves: tuple[Curve, ...]
    uses: tuple[Use, ...]
    report: reportfile.ReportRecord | None
    fields: tuple[FieldVerdict, ...]
    # Bytes of each bucket of gradients on rank 0, in the order of sending.
    buckets: tuple[int, ...]
    # Names and values: versions, git, command and settings other than defaults.
    facts: tuple[tuple[str, str], ...]
    attempts: int
    is_running: bool = False
    # Steps per second of ranks by the times in their own heartbeats.
    speeds: tuple[float, ...] = ()
    # The labels of the ranks that failed first, or that a hang waits for.
    culprits: tuple[str, ...] = ()


# Returns what a run's host has measured, thinned out.
Measured = Callable[[Run], Sequence[metricsfile.MetricsRecord]]


def metrics_reader(run: Run) -> metricsfile.MetricsReader:
    """Return a reader of the measurements of RUN's host, thinned out."""
    # A launcher that was killed at once has left no plan.
    ranks = max(run.processes, 1) * (1 if run.plan is None else len(run.plan.nodes))
    most = max(_LEAST_MOMENTS, min(_MOST_MOMENTS, _MOST_VALUES // ranks))
    return run.metrics(most)


def measured(run: Run) -> Sequence[metricsfile.MetricsRecord]:
    """Return the measurements of RUN's host so far."""
    return metrics_reader(run).read()


def read(
    job_runs: Sequence[Run], *, measured: Measured = measured, most_bytes: int = _MOST_BYTES
) -> RunHistory:
    """Return the history of a job, whose hosts have left JOB_RUNS.

    At most MOST_BYTES of each log are searched for steps and losses.
    """
    first = job_runs[0]
    began = min((run.started_at for run in job_runs if run.started_at is not None), default=0.0)
    bars: list[AttemptSpan] = []
    moments: list[Moment] = []
    culprits: list[str] = []
    fields: tuple[FieldVerdict, ...] = ()
    last = max((run.finished_at or 0.0 for run in job_runs), default=0.0)
    running = {run.path for run in job_runs if run.is_running}
    if running and began:
        last = time.time()
    for run in job_runs:
        host = run.host if len(job_runs) > 1 else ""
        peaks: dict[tuple[str, int], int | None] = {}
        for event in run.events:
            last = max(last, event.time)
            if event.event == "exited":
                key = event.process, event.attempt
                peaks[key] = reading.whole(event.more.get("peak_bytes"))
            elif event.event == "strategy_report":
                fields = eventfile.verdicts(event)
            elif event.event in _SHOWN:
                for entry in reading.mappings(event.more.get("collectives")):
                    culprits += reading.texts(entry.get("who"))
                moments.append(Moment(event.time - began, event.event, _description(event)))
        axes = run.axes()
        for log in run.logs:
            peak = peaks.get((log.process, log.attempt))
            place = axes.place(log.rank) if axes is not None and log.rank is not None else ""
            bar = _bar(log, began, last, host)._replace(peak_bytes=peak, place=place)
            if bar.kind == OPEN and run.path in running:
                bar = bar._replace(kind=ALIVE, how="running")
            bars.append(bar)
    bars.sort(key=lambda bar: (_number(bar.label), bar.attempt))
    failed = next((run for run in job_runs if run.exit_code), first)
    manifest = reading.document(os.path.join(first.path, names.MANIFEST)) or {}
    metrics = [measured(run) for run in job_runs]
    return RunHistory(
        name=first.name,
        script=_script(reading.texts(manifest.get("command"))),
        verdict=failed.verdict,
        exit_code=failed.exit_code,
        began=began,
        seconds=max(last - began, 0.0),
        hosts=tuple(first.plan.nodes) if first.plan else (),
        bars=tuple(bars),
        moments=tuple(sorted(moments)),
        curves=tuple(_curves(job_runs, began, metrics, most_bytes)),
        uses=(
            *_uses(job_runs, began, metrics),
            *_in_collectives(job_runs, began, last),
        ),
        report=failed.report(),
        fields=fields,
        buckets=_buckets(first.path),
        facts=(("run", first.name), *_facts(manifest)),
        attempts=max(run.attempt for run in job_runs) + 1,
        is_running=bool(running),
        speeds=tuple(_speeds(job_runs)),
        culprits=tuple(
            dict.fromkeys([*(bar.label for bar in bars if bar.kind == FIRST), *culprits])
        ),
    )


def _speeds(job_runs: Sequence[Run]) -> Iterator[float]:
    """Yield the steps per second of each rank whose heartbeat has the times of its updates."""
    for run in job_runs:
        for log in {log.process: log for log in run.logs}.values():
            beat = run.heartbeat(log)
            speed = None if beat is None else progress.steps_per_second(beat.points)
            if speed is not None:
                yield speed


def _in_collectives(job_runs: Sequence[Run], began: float, last: float) -> Iterator[Use]:
    """Yield the share of time that ranks spent in blocking collectives.

    The flight recorder keeps the newest ones. The rank that all others wait for is in none. An
    unfinished collective lasts until LAST.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for run in job_runs:
        records = run.collectives()
        for rank, record in [*records.items()][:_MOST_RANKS]:
            for collective in record.collectives:
                if collective.state == flightfile.BLOCKING or collective.is_open:
                    issued = collective.issued_at
                    end = last if collective.is_open else collective.done_at or issued
                    spans.setdefault(f"rank {rank}", []).append((issued, max(end, issued)))
    if not spans:
        return
    # The time that all rings reach back to.
    begin = max(min(issued for issued, _ in of_rank) for of_rank in spans.values())
    length = max(max(done for _, done in of_rank) for of_rank in spans.values()) - begin
    width_s = max(length, 1e-6) / _MOST_COLUMNS
    rows = {}
    for label, of_rank in sorted(spans.items(), key=lambda row: _number(row[0])):
        row = rows[label] = [0.0] * _MOST_COLUMNS
        for issued, done in of_rank:
            left, right = (max(at - begin, 0.0) / width_s for at in (issued, done))
            for at in range(int(left), min(int(right) + 1, _MOST_COLUMNS)):
                row[at] += max(min(right, at + 1) - max(left, at), 0.0) * 100
    shown = tuple(begin - began + at * width_s for at in range(_MOST_COLUMNS))
    values = tuple(tuple(round(min(share, 100.0), 2) for share in row) for row in rows.values())
    yield Use(COLLECTIVES, "%", tuple(rows), shown, values)


def _bar(log: LogRecord, began: float, last: float, host: str) -> AttemptSpan:
    if log.ended_at is None:
        kind, how = OPEN, "no end is recorded"
    elif log.code == 0:
        kind, how = WELL, "exit code 0"
    else:
        kind = FIRST if log.has_failed else ALONG
        how = f"killed by {log.signal}" if log.signal else f"exit code {log.code}"
    end = last if log.ended_at is None else log.ended_at
    return AttemptSpan(
        log.label, log.attempt, log.started_at - began, end - began, kind, how, host, log.paths
    )


def _number(label: str) -> tuple[str, int]:
    """Return the key that sorts labels naturally.

    >>> sorted(["rank 10", "rank 9", "server 0"], key=_number)
    ['rank 9', 'rank 10', 'server 0']
    """
    word, _, number = label.rpartition(" ")
    return word, int(number) if number.isdecimal() else 0


def _description(event: eventfile.EventRecord) -> str:
    """Return a short description of EVENT."""
    more = event.more
    for key in ("text", "why", "what", "signal"):
        if more.get(key):
            return reading.text(more[key])
    if event.event == "hung":
        parts = [
            reading.text(entry.get("text")) for entry in reading.mappings(more.get("collectives"))
        ]
        parts += [
            f"{names.listed(reading.texts(place.get('who')))}: {reading.text(place.get('where'))}"
            for place in reading.mappings(more.get("places"))
        ]
        return "; ".join((f"{more.get('seconds')} s without a sign of life", *parts))
    if event.event == "strategy_rejected":
        return " ".join(reading.texts(more.get("faults")))
    return f"attempt {event.attempt}"


def _curves(
    job_runs: Sequence[Run],
    began: float,
    metrics: Sequence[Sequence[metricsfile.MetricsRecord]],
    most_bytes: int,
) -> list[Curve]:
    """Return the printed steps and losses of failed ranks and the first others."""
    logs = [(run, log) for run in job_runs for log in run.logs]
    logs.sort(key=lambda pair: (not pair[1].has_failed, _number(pair[1].label), pair[1].attempt))

    @functools.cache
    def times(folder: str) -> Mapping[str, outputtimes.LogTimes]:
        return outputtimes.Reader(os.path.join(folder, names.OUTPUT_TIMES)).read()

    curves = [
        curve
        for run, log in logs[:_MOST_LOGS]
        if (curve := _curve(log, times(run.path), began, most_bytes)) is not None
    ]
    if not any(curve.has_steps for curve in curves):
        curves += _heartbeats(metrics, began)
    return sorted(curves, key=lambda curve: _number(curve.label))


def _heartbeats(
    metrics: Sequence[Sequence[metricsfile.MetricsRecord]], began: float
) -> list[Curve]:
    """Return the steps that ranks reported to metrics.jsonl, as a strategy makes them do."""
    rows: dict[str, list[tuple[float, int]]] = {}
    for records in metrics:
        for record in records:
            for usage in record.ranks:
                if usage.step is not None:
                    label = names.label_of(usage.process)
                    label += f", attempt {record.attempt}" if record.attempt else ""
                    at = record.time if usage.step_at is None else usage.step_at
                    points = rows.setdefault(label, [])
                    if not points or points[-1][1] != usage.step:
                        points.append((round(at - began, 3), usage.step))
    picked = sorted(rows.items(), key=lambda row: _number(row[0]))[:_MOST_LOGS]
    return [
        Curve(
            label,
            tuple(step for _, step in points),
            tuple(at for at, _ in points),
            (None,) * len(points),
        )
        for label, points in picked
    ]


def lines(path: str, most: int = _MOST_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of the log PATH, each with the offset of its end.

    Of a log larger than MOST bytes, pieces that are spread evenly are read, from its beginning to
    its end.
    """
    try:
        size = os.stat(path).st_size
    except OSError:
        return
    count = 1 if size <= most else _PIECES
    length = min(size, most) // count
    for place in range(count):
        begin = place * (size - length) // max(1, count - 1)
        piece = reading.piece(path, begin, length)
        if begin:
            # It most likely begins within a line.
            cut = piece.find(b"\n") + 1
            begin, piece = begin + cut, piece[cut:]
        if begin + len(piece) < size:
            piece = piece[: piece.rfind(b"\n") + 1]
        for line in re.split(rb"(?<=[\r\n])", piece):
            begin += len(line)
            yield begin, line


def _curve(
    log: LogRecord, times: Mapping[str, outputtimes.LogTimes], began: float, most_bytes: int
) -> Curve | None:
    """Return the curve of one log; None without steps and losses, or without their times."""
    rows: dict[int, tuple[float, float | None]] = {}
    has_steps = False
    throughput = ""
    for path in log.paths:
        noted = times.get(os.path.basename(path))
        if noted is None or noted.cuts:
            continue
        look = 0
        for offset, line in lines(path, most_bytes):
            reported = progress.printed(line)
            throughput = reported.throughput or throughput
            if reported.step is None and reported.loss is None:
                continue
            while look < len(noted.offsets) - 1 and noted.offsets[look] < offset:
                look += 1
            at = noted.at_ms[look] / 1000 - began if noted.at_ms else 0.0
            has_steps = has_steps or reported.step is not None
            step = reported.step if reported.step is not None else len(rows) + 1
            rows[step] = (at, reported.loss)
    every = max(1, len(rows) // _MOST_POINTS)
    points = sorted(rows.items())
    if not points:
        return None
    # Keep the last one, as people look for it.
    picked = [*points[:-1:every], points[-1]]
    label = f"{log.label}, attempt {log.attempt}" if log.attempt else log.label
    return Curve(
        label,
        tuple(step for step, _ in picked),
        tuple(round(at, 3) for _, (at, _) in picked),
        tuple(loss for _, (_, loss) in picked),
        has_steps,
        throughput,
    )


def _uses(
    job_runs: Sequence[Run], began: float, metrics: Sequence[Sequence[metricsfile.MetricsRecord]]
) -> Iterator[Use]:
    """Yield what ranks and GPUs used by METRICS of each host, and how long steps took."""
    cells: dict[tuple[str, str], dict[str, dict[int, float]]] = {kind: {} for kind in _KINDS}
    # Hosts sample at different times, so samples within one interval are one moment.
    width_s = max((_interval_s(records) for records in metrics), default=1.0)
    for run, records in zip(job_runs, metrics, strict=True):
        host = run.host if len(job_runs) > 1 else ""
        for label, kinds, samples in _sampled(records, host, began, width_s):
            # Each of thousands of ranks has hundreds of moments.
            for kind, values in zip(kinds, zip(*samples.values(), strict=True), strict=True):
                known = {at: v for at, v in zip(samples, values, strict=True) if v is not None}
                if known:
                    cells[kind].setdefault(label, {}).update(known)
    for (title, unit), rows in cells.items():
        moments = sorted({at for row in rows.values() for at in row})
        if rows and moments:
            order = sorted(rows, key=_number)
            most = max(value for row in rows.values() for value in row.values())
            # A unit with few digits.
            small = {"GiB": "MiB", "s": "ms"}.get(unit, "") if most < 1 else ""
            times = {"MiB": _MIB_EACH, "ms": 1000}.get(small, 1)
            values = tuple(_scaled(map(rows[row].get, moments), times) for row in order)
            shown = tuple(at * width_s for at in moments)
            yield Use(title, small or unit, tuple(order), shown, values)


def _sampled(
    records: Iterable[metricsfile.MetricsRecord], host: str, began: float, width_s: float
) -> Iterator[tuple[str, Sequence[tuple[str, str]], _Seen]]:
    """Yield each rank and GPU in RECORDS of HOST, the kinds of usage, and their samples."""
    ranks: dict[str, tuple[_Seen, _StepClock]] = {}
    cards: dict[int, _Seen] = {}
    for record in records:
        at = int((record.time - began) // width_s)
        for usage in record.ranks:
            rank = ranks.get(usage.process)
            if rank is None:
                rank = ranks[usage.process] = {}, _StepClock()
            took_s = rank[1].see(record.time, usage.step)
            rank[0][at] = usage.cpu_percent, usage.memory_bytes / _GIB, took_s
        for card in record.gpus:
            used = card.memory_used_bytes
            use = card.use_percent, None if used is None else used / _GIB
            cards.setdefault(card.number, {})[at] = use
    for process, (samples, _) in ranks.items():
        yield names.label_of(process), (_CPU, _MEMORY, _STEP), samples
    for number, samples in cards.items():
        yield f"{host} GPU {number}".strip(), (_GPU, _GPU_MEMORY), samples


def _scaled(row: Iterable[float | None], times: int) -> tuple[float | None, ...]:
    return tuple(None if value is None else round(value * times, 6) for value in row)


def _interval_s(records: Sequence[metricsfile.MetricsRecord]) -> float:
    """Return the median interval between RECORDS in seconds."""
    intervals = sorted(after.time - before.time for before, after in pairwise(records))
    return max(intervals[len(intervals) // 2] if intervals else 1.0, 1.0)


class _StepClock:
    """Measures the time of a rank's steps; an unfinished step takes at least until now."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def see(self, at: float, step: int | None) -> float | None:
        """Return the seconds of a step, given that the rank was at STEP at the time AT."""
        if step is None:
            return None
        if self._last is None or step < self._last[1]:
            # The first step, also of another epoch or attempt.
            self._last = at, step
            return None
        took_s = (at - self._last[0]) / max(step - self._last[1], 1)
        if step > self._last[1]:
            self._last = at, step
        return took_s


def _buckets(path: str) -> tuple[int, ...]:
    evidence = strategyfiles.parse_evidence(rankfile.evidence(path, "0"))
    if evidence is None or evidence.counts is None:
        return ()
    return evidence.counts.bucket_bytes


def _script(command: Sequence[str]) -> str:
    """Return the name of the script that COMMAND runs.

    >>> _script(["--gpus", "0,1", "sub/train.py", "--epochs=3"])
    'train.py'
    """
    try:
        script = split(command).script
    except FleetrunError:
        return ""
    return "" if script is None else script.name


def _facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the origin of the run by MANIFEST."""
    facts = [("command", " ".join(("fleetrun", *reading.texts(manifest.get("command")))))]
    facts += [("folder", reading.text(manifest.get("cwd")))]
    facts += [
        (name, reading.text(value))
        for name, value in reading.mapping(manifest.get("versions")).items()
        if value
    ]
    git = reading.mapping(manifest.get("git"))
    if git:
        dirty = " and changes" if git.get("dirty") else ""
        facts.append(("git", f"{reading.text(git.get('commit'))}{dirty}"))
    facts += [
        (f"--{reading.text(setting.get('name'))}", reading.text(setting.get("value")))
        for setting in reading.mappings(manifest.get("settings"))
        if setting.get("source") != "default"
    ]
    return [(name, value) for name, value in facts if value]
