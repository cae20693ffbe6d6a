"""What a run has printed and used over time: lines of losses and steps, heat maps of ranks."""

from __future__ import annotations

import base64
import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fleetrun.commands.logs.show import LogFilter, LogStream
from fleetrun.rundir import flightfile, metricsfile, names, outputtimes, progress
from fleetrun.rundir.metricsfile import MetricsRecord
from fleetrun.rundir.runs import LogRecord, Run

# A chart of fewer says nothing that a number does not say.
FEWEST_POINTS = 3
# The logs that are searched for steps and losses, and the most points of a curve.
_MOST_LOGS, _MOST_POINTS = 8, 2000
# The moments of a map, and its cells, all of which a browser gets.
_LEAST_MOMENTS, _MOST_MOMENTS, _MOST_VALUES = 16, 240, 1 << 16
# The columns of the map of collectives, and the ranks whose collectives are read.
_COLUMNS, _MOST_RANKS = 120, 256
COLLECTIVES = "Time in collectives"
_STEP = "Step time"
# The titles of the maps in their order, and their units.
_UNITS = {_STEP: "s", "CPU use": "% of one", "Memory": "GiB", "GPU use": "%", "GPU memory": "GiB"}


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


def curves(job_runs: Sequence[Run], began: float, most_bytes: int) -> list[Curve]:
    """Return what failed ranks and others printed in the last MOST_BYTES of their logs."""
    logs = [(run, log) for run in job_runs for log in run.logs]
    logs.sort(key=lambda pair: (not pair[1].has_failed, order(pair[1].label), pair[1].attempt))
    readers = {run.path: outputtimes.Reader(run.file(names.OUTPUT_TIMES)) for run in job_runs}
    printed = [_curve(log, readers[run.path], began, most_bytes) for run, log in logs[:_MOST_LOGS]]
    known = [curve for curve in printed if curve is not None]
    return sorted(known, key=lambda curve: order(curve.label))


def _curve(
    log: LogRecord, reader: outputtimes.Reader, began: float, most_bytes: int
) -> Curve | None:
    """Return the curve of one log; None without steps and losses."""
    points: dict[int, tuple[float, float | None]] = {}
    has_steps = False
    for path in log.paths:
        try:
            log_filter = LogFilter(most_bytes=most_bytes)
            stream = LogStream(path, reader, log_filter, prefix=b"", is_raw=False)
        except OSError:
            continue
        for at_ms, _, text in stream.news(0, is_alone=False):
            for line in re.split(rb"[\r\n]+", text):
                told = progress.printed(line)
                if told.step is None and told.loss is None:
                    continue
                has_steps = has_steps or told.step is not None
                step = len(points) + 1 if told.step is None else told.step
                points[step] = round(at_ms / 1000 - began, 3), told.loss
        stream.close()
    if not points:
        return None
    # Keep the last one, as people look for it.
    steps = sorted(points)
    steps = [*steps[: -1 : max(1, len(steps) // _MOST_POINTS)], steps[-1]]
    at, losses = zip(*map(points.__getitem__, steps), strict=True)
    return Curve(log.title(), steps, at, losses, has_steps)


def lines(curves: Sequence[Curve], name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a chart of the losses or steps of CURVES, those that say something."""
    for curve in curves:
        values: Sequence[float | None] = curve.steps if curve.has_steps else ()
        if name == "loss":
            # Gaps in place of infinities and NaN.
            finite = float("inf")
            values = [None if x is None or not abs(x) < finite else x for x in curve.losses]
        if sum(value is not None for value in values) >= FEWEST_POINTS:
            yield {"name": curve.label, "x": curve.at, "y": values}


# -- heat maps -------------------------------------------------------------------------------------


def usage(job_runs: Sequence[Run], began: float) -> Iterator[dict[str, Any]]:
    """Yield the maps of what ranks and GPUs used, and how long steps took, by metrics.jsonl."""
    # Hosts sample at different times, so samples within one interval are one moment.
    width_s = 1.0
    samples: list[tuple[str, str, float, float | None]] = []
    for run in job_runs:
        # A launcher that was killed at once has left no plan.
        ranks = max(run.processes, 1) * (1 if run.plan is None else len(run.plan.nodes))
        most = max(_LEAST_MOMENTS, min(_MOST_MOMENTS, _MOST_VALUES // ranks))
        records = metricsfile.spread(run.file(names.METRICS), most)
        intervals = sorted(after.time - before.time for before, after in pairwise(records))
        width_s = max([width_s, *intervals[len(intervals) // 2 :][:1]])
        samples += _measurements(records, run.host if len(job_runs) > 1 else "")
    # By title and row: the value at each moment.
    rows: dict[str, dict[str, dict[int, float]]] = {title: {} for title in _UNITS}
    for title, row, at, value in samples:
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
    records: Sequence[MetricsRecord], host: str
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


def in_collectives(job_runs: Sequence[Run], began: float, last: float) -> Iterator[dict[str, Any]]:
    """Yield the map of the share of time that ranks spent in blocking collectives.

    The flight recorder keeps the newest ones. The rank that all others wait for is in none. An
    unfinished collective lasts until LAST.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for run in job_runs:
        for rank, record in [*run.collectives().items()][:_MOST_RANKS]:
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
    numbers = array("f", [value for row in cells for value in row])
    packed = base64.b64encode(numbers.tobytes()).decode()
    return {"title": title, "unit": unit, "rows": rows, "at": at, "values": packed}
