"""What a run has printed and used over time: curves of losses and steps, heat maps of ranks."""

from __future__ import annotations

import base64
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fleetrun.rundir import flightfile, metricsfile, names, outputtimes, progress, reading
from fleetrun.rundir.runs import LogRecord, Run

# A chart of fewer says nothing that a number does not say.
FEWEST_POINTS = 3
# The logs that are searched for steps and losses, and the bytes read at the end of each.
_MOST_LOGS, MOST_BYTES = 8, 16 << 20
# The most points of a curve.
_MOST_POINTS = 2000
# The moments of a map, and its cells, all of which a browser gets.
_LEAST_MOMENTS, _MOST_MOMENTS, _MOST_VALUES = 16, 240, 1 << 16
# The columns of the map of collectives, and the ranks whose collectives are read.
_COLUMNS, _MOST_RANKS = 120, 256
COLLECTIVES = "Time in collectives"
_STEP = "Step time"
# The titles of the maps in their order, and their units.
_UNITS = {_STEP: "s", "CPU use": "% of one", "Memory": "GiB", "GPU use": "%", "GPU memory": "GiB"}

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


def order(label: str) -> tuple[str, int]:
    """Return the key that sorts labels naturally.

    >>> sorted(["rank 10", "rank 9", "server 0"], key=order)
    ['rank 9', 'rank 10', 'server 0']
    """
    word, _, number = label.rpartition(" ")
    return word, int(number) if number.isdecimal() else 0


# -- curves ----------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """What a rank printed: steps, when (seconds since the job began), and losses (None: none).

    If it printed no steps, its losses are numbered, and `has_steps` is false.
    """

    label: str
    steps: Sequence[int]
    at: Sequence[float]
    losses: Sequence[float | None]
    has_steps: bool = True
    # Tokens, samples or images a second, as last printed; empty if never.
    throughput: str = ""


def curves(
    job_runs: Sequence[Run], began: float, measured: Measured, most_bytes: int
) -> list[Curve]:
    """Return the printed steps and losses of failed ranks and the first others.

    If no steps were printed, those of heartbeats in metrics.jsonl count.
    """
    logs = [(run, log) for run in job_runs for log in run.logs]
    logs.sort(key=lambda pair: (not pair[1].has_failed, order(pair[1].label), pair[1].attempt))
    times = {
        run.path: outputtimes.Reader(run.file(names.OUTPUT_TIMES)).read()
        for run, _ in logs[:_MOST_LOGS]
    }
    printed = [_printed(log, times[run.path], began, most_bytes) for run, log in logs[:_MOST_LOGS]]
    known = [curve for curve in printed if curve is not None]
    if not any(curve.has_steps for curve in known):
        known += _heartbeats(job_runs, began, measured)
    return sorted(known, key=lambda curve: order(curve.label))


def _printed(
    log: LogRecord, times: Mapping[str, outputtimes.LogTimes], began: float, most_bytes: int
) -> Curve | None:
    """Return the curve of one log; None without steps and losses, or without their times."""
    points: dict[int, tuple[float, float | None]] = {}
    has_steps, throughput = False, ""
    for path in log.paths:
        noted = times.get(os.path.basename(path))
        if noted is None or noted.cuts or not noted.at_ms:
            continue
        look = 0
        for offset, line in _lines(path, most_bytes):
            reported = progress.printed(line)
            throughput = reported.throughput or throughput
            if reported.step is None and reported.loss is None:
                continue
            while look < len(noted.offsets) - 1 and noted.offsets[look] < offset:
                look += 1
            has_steps = has_steps or reported.step is not None
            step = len(points) + 1 if reported.step is None else reported.step
            points[step] = round(noted.at_ms[look] / 1000 - began, 3), reported.loss
    if not points:
        return None
    # Keep the last one, as people look for it.
    steps = sorted(points)
    steps = [*steps[: -1 : max(1, len(steps) // _MOST_POINTS)], steps[-1]]
    at, losses = zip(*map(points.__getitem__, steps), strict=True)
    return Curve(_label(log.label, log.attempt), steps, at, losses, has_steps, throughput)


def _label(label: str, attempt: int) -> str:
    return f"{label}, attempt {attempt}" if attempt else label


def _lines(path: str, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of the last MOST bytes of the log PATH, each with the offset of its end."""
    text = reading.content(path, most, from_end=True) or b""
    end = max(0, reading.size(path) - len(text))
    for line in re.split(rb"(?<=[\r\n])", text):
        end += len(line)
        yield end, line


def _heartbeats(job_runs: Sequence[Run], began: float, measured: Measured) -> Iterator[Curve]:
    """Yield the steps that the first ranks reported to metrics.jsonl, as a strategy has them do."""
    steps_of: dict[str, dict[int, float]] = {}
    for record in (record for run in job_runs for record in measured(run)):
        for usage in record.ranks:
            if usage.step is not None:
                label = _label(names.label_of(usage.process), record.attempt)
                at = record.time if usage.step_at is None else usage.step_at
                steps_of.setdefault(label, {}).setdefault(usage.step, round(at - began, 3))
    for label in sorted(steps_of, key=order)[:_MOST_LOGS]:
        steps = steps_of[label]
        yield Curve(label, [*steps], [*steps.values()], [None] * len(steps))


def speeds(job_runs: Sequence[Run], curves: Sequence[Curve]) -> list[float]:
    """Return the steps per second of ranks, by the times in their heartbeats or else by CURVES."""
    newest = {(run.path, log.process): (run, log) for run in job_runs for log in run.logs}
    beats = [run.heartbeat(log) for run, log in newest.values()]
    beaten = [progress.steps_per_second(beat.points) for beat in beats if beat is not None]
    printed = [
        progress.steps_per_second(tuple(zip(curve.at, curve.steps, strict=True)))
        for curve in curves
        if curve.has_steps
    ]
    known = [speed for speed in beaten if speed is not None]
    return known or [speed for speed in printed if speed is not None]


def lines(curves: Sequence[Curve], name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a chart of the losses or steps of CURVES, those that say something."""
    for curve in curves:
        values: Sequence[float | None] = curve.steps
        if name == "loss":
            # Gaps in place of infinities and NaN.
            finite = float("inf")
            values = [None if x is None or not abs(x) < finite else x for x in curve.losses]
        known = sum(value is not None for value in values)
        if known < FEWEST_POINTS or not (name == "loss" or curve.has_steps):
            continue
        yield {"name": curve.label, "x": curve.at, "y": values}


# -- heat maps -------------------------------------------------------------------------------------


def usage(job_runs: Sequence[Run], began: float, measured: Measured) -> Iterator[dict[str, Any]]:
    """Yield the maps of what ranks and GPUs used, and how long steps took, by metrics.jsonl."""
    samples = [(run, measured(run)) for run in job_runs]
    # Hosts sample at different times, so samples within one interval are one moment.
    width_s = max((_interval_s(records) for _, records in samples), default=1.0)
    # By title and row: the value at each moment.
    rows: dict[str, dict[str, dict[int, float]]] = {title: {} for title in _UNITS}
    for run, records in samples:
        host = run.host if len(job_runs) > 1 else ""
        for title, row, at, value in _measurements(records, host):
            if value is not None:
                rows[title].setdefault(row, {})[int((at - began) // width_s)] = value
    for title, values_of in rows.items():
        moments = sorted({at for values in values_of.values() for at in values})
        if len(moments) < FEWEST_POINTS:
            continue
        labels = sorted(values_of, key=order)
        cells = [[values_of[row].get(at, float("nan")) for at in moments] for row in labels]
        yield _map(title, _UNITS[title], labels, [at * width_s for at in moments], cells)


def _measurements(
    records: Sequence[metricsfile.MetricsRecord], host: str
) -> Iterator[tuple[str, str, float, float | None]]:
    """Yield the title, row, time and value of each measurement in RECORDS of HOST."""
    # When a rank was first seen at its last step; an unfinished step takes at least until now.
    since: dict[str, tuple[float, int]] = {}
    for record in records:
        for rank in record.ranks:
            label = names.label_of(rank.process)
            yield "CPU use", label, record.time, rank.cpu_percent
            yield "Memory", label, record.time, rank.memory_bytes / (1 << 30)
            if rank.step is None:
                continue
            at, step = since.get(label, (record.time, rank.step + 1))
            if rank.step >= step:
                yield _STEP, label, record.time, (record.time - at) / max(rank.step - step, 1)
            # Fewer steps: the first ones of all, of an epoch or of an attempt.
            if rank.step != step:
                since[label] = record.time, rank.step
        for card in record.gpus:
            label, used = f"{host} GPU {card.number}".strip(), card.memory_used_bytes
            yield "GPU use", label, record.time, card.use_percent
            yield "GPU memory", label, record.time, None if used is None else used / (1 << 30)


def _interval_s(records: Sequence[metricsfile.MetricsRecord]) -> float:
    """Return the median interval between RECORDS in seconds."""
    intervals = sorted(after.time - before.time for before, after in pairwise(records))
    return max(intervals[len(intervals) // 2] if intervals else 1.0, 1.0)


def in_collectives(job_runs: Sequence[Run], began: float, last: float) -> Iterator[dict[str, Any]]:
    """Yield the map of the share of time that ranks spent in blocking collectives.

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
    # The time that all records reach back to.
    begin = max(min(issued for issued, _ in of_rank) for of_rank in spans.values())
    length = max(max(done for _, done in of_rank) for of_rank in spans.values()) - begin
    width_s = max(length, 1e-6) / _COLUMNS
    labels = sorted(spans, key=order)
    cells = []
    for label in labels:
        row = [0.0] * _COLUMNS
        for issued, done in spans[label]:
            left, right = (max(at - begin, 0.0) / width_s for at in (issued, done))
            for at in range(int(left), min(int(right) + 1, _COLUMNS)):
                row[at] += max(min(right, at + 1) - max(left, at), 0.0) * 100
        cells.append([min(share, 100.0) for share in row])
    columns = [begin - began + column * width_s for column in range(_COLUMNS)]
    yield _map(COLLECTIVES, "%", labels, columns, cells)


def _map(
    title: str,
    unit: str,
    rows: Sequence[str],
    at: Sequence[float],
    cells: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """Return a heat map, whose numbers are 32-bit floats in base64, row by row; NaN: unknown."""
    numbers = array("f")
    for row in cells:
        numbers.extend(row)
    packed = base64.b64encode(numbers.tobytes()).decode()
    return {"title": title, "unit": unit, "rows": rows, "at": at, "values": packed}
