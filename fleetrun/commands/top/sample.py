"""Samples the state of a run's ranks: from its run directory, and from /proc on its host."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fleetrun.commands import job_commands
from fleetrun.host import jobs, usage
from fleetrun.postmortem import flight
from fleetrun.run import proc
from fleetrun.rundir import (
    eventfile,
    flightfile,
    metricsfile,
    names,
    progress,
    rankfile,
    reading,
    runs,
)
from fleetrun.text import format_duration, format_ranges

# A rank without a new step or line for this long is silent.
_SILENT_S = 10.0
# How long a straggler stays marked: the launcher reports it only from time to time.
_STRAGGLER_S = 60.0
# Older measurements are not shown.
_OLD_S = 60.0
# The collectives of larger jobs take too long to read at each look.
_MOST_RECORDED = 256
# The least time over which steps are averaged.
_WINDOW_S = 10.0


class RankRow(NamedTuple):
    """One process; None: unknown, or not visible from this host."""

    label: str
    rank: int | None
    # running, silent, slow, stopped, done, failed, ended, and so on.
    state: str
    host: str
    device: str
    pid: int | None
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    power_w: float | None = None
    step: int | None = None
    steps_per_s: float | None = None
    loss: float | None = None
    # As the script prints it: tokens, samples or images per second.
    throughput: str = ""
    line: str = ""
    # Whether it needs attention.
    is_odd: bool = False
    # Its place in fleet's topology: `dp 1, mp 0`.
    place: str = ""
    # The number of the last step, as the script prints it.
    total_steps: int | None = None
    # The collective in which it waits, how long, and for whom.
    waits: str = ""
    # The files of its output, and of its stacks.
    logs: tuple[str, ...] = ()
    stacks: str = ""


class Snapshot(NamedTuple):
    """The state of a job at one moment."""

    job: str
    run: str
    # running, starting, stopping or over.
    phase: str
    seconds: float
    attempt: int
    max_restarts: int | None
    hosts: int
    rows: tuple[RankRow, ...]
    # The newest warning, and how the job ended.
    notice: str = ""
    verdict: str = ""
    exit_code: int | None = None
    # Seconds to the last step, if the number of steps and the speed are known.
    eta_s: float | None = None


class _LogState:
    """What is remembered of one log between samples."""

    def __init__(self) -> None:
        self.size = -1
        self.printed = progress.Progress()
        # Monotonic time of the last sign of life, and of the last new step.
        self.lived_at = self.stepped_at = time.monotonic()
        # Steps with their times, oldest first, within the window; the last one of all.
        self.steps: list[tuple[float, int]] = []
        self.step: int | None = None
        self.cpu: tuple[float, float] | None = None


class Sampler:
    """Samples the runs CHOSEN of one job; PATTERN extracts step and loss from log lines."""

    def __init__(self, chosen: Sequence[runs.Run], *, pattern: re.Pattern[bytes] | None) -> None:
        self._runs = list(chosen)
        self._reader = runs.RunReader()
        self._pattern = pattern
        self._notices: dict[str, list[eventfile.EventRecord]] = {}
        self._logs: dict[str, _LogState] = {}
        # By run: fleet's topology, once a rank has recorded it.
        self._topologies: dict[str, rankfile.RankAxes] = {}

    def ask_for_stacks(self) -> int:
        """Ask the launchers on this host for stacks of their ranks; return their number."""
        return jobs.ask_for_stacks([run.path for run in self._runs])

    def sample(self) -> Snapshot:
        """Return the current state of the job."""
        has_launcher = [run.is_running for run in self._runs]
        self._refresh()
        # The launcher may still write something.
        is_running = [
            alive and run.finished_at is None
            for alive, run in zip(has_launcher, self._runs, strict=True)
        ]
        pairs = zip(self._runs, is_running, strict=True)
        rows = [row for run, alive in pairs for row in self._rows(run, is_alive=alive)]
        rows = _waiting(self._runs, rows) if any(is_running) else rows
        rows.sort(key=lambda row: (row.rank is None, not row.label.startswith("rank "), row.rank))
        rows = compared(rows)
        first = self._runs[0]
        now = time.time()
        is_over = not any(is_running)
        end = max((run.finished_at or 0.0 for run in self._runs), default=0.0) if is_over else now
        bad = next((run for run in self._runs if run.exit_code), first)
        warnings = [event for events in self._notices.values() for event in events]
        newest = max(warnings, key=lambda event: event.time, default=None)
        return Snapshot(
            job=job_commands.name_of(first.name, is_known=bool(first.job_id)),
            run=first.path,
            phase=_phase(self._runs, rows, is_over=is_over),
            seconds=max(0.0, (end or now) - min(run.started_at or now for run in self._runs)),
            attempt=max(run.attempt for run in self._runs),
            max_restarts=None if first.plan is None else first.plan.max_restarts,
            hosts=max(len(self._runs), 1 if first.plan is None else len(first.plan.nodes)),
            rows=tuple(rows),
            notice="" if newest is None else reading.text(newest.more.get("text")),
            verdict=(bad.verdict or "its launcher was killed") if is_over else "",
            exit_code=bad.exit_code if is_over else None,
            eta_s=None if is_over else eta_s(rows),
        )

    def _refresh(self) -> None:
        """Read changed run directories again."""
        for place, before in enumerate(self._runs):
            run = self._runs[place] = self._reader.read(before.path)
            if run is not before:
                self._notices[run.path] = [e for e in run.events if e.event == "warning"]

    def _rows(self, run: runs.Run, *, is_alive: bool) -> Iterator[RankRow]:
        """Yield the row of each process of RUN, in its newest attempt."""
        newest = {log.process: log for log in run.logs}
        specs = {spec.name: spec for spec in run.plan.processes} if run.plan is not None else {}
        # A pid of another host means nothing here.
        is_here = (
            is_alive
            and run.launcher_pid is not None
            and any("fleetrun" in word for word in proc.argv(run.launcher_pid))
        )
        pids = [log.pid for log in newest.values() if log.ended_at is None and log.pid is not None]
        used = usage.of(pids) if is_here else {}
        measured = run.newest_metrics() if is_alive else None
        if measured is not None and measured.time < time.time() - _OLD_S:
            measured = None
        for name, log in newest.items():
            devices = specs[name].devices if name in specs else ()
            row = self._row(run, log, used.get(log.pid or -1), is_alive=is_alive)
            row = row._replace(host=run.host or socket.gethostname())
            row = row._replace(device=",".join(devices) or "cpu")
            if measured is not None and log.ended_at is None:
                row = _with(row, measured, is_here=is_here)
            yield row
        for name, spec in specs.items():
            if name not in newest:
                # It waits for the processes that it depends on.
                state = "to start" if is_alive else "never ran"
                device = ",".join(spec.devices)
                yield RankRow(names.label_of(name), spec.rank, state, run.host, device, None)

    def _row(
        self, run: runs.Run, log: runs.LogRecord, used: usage.Usage | None, *, is_alive: bool
    ) -> RankRow:
        now = time.monotonic()
        seen = self._logs.setdefault(log.path, _LogState())
        size = sum(map(reading.size, log.paths))
        is_first = seen.size == -1
        if size != seen.size:
            seen.size, seen.lived_at = size, now
            printed = progress.printed(progress.tail(log.paths), self._pattern)
            # Values that have left the tail are still the newest.
            if printed.step is None:
                printed = printed._replace(step=seen.printed.step, total=seen.printed.total)
            if printed.loss is None:
                printed = printed._replace(loss=seen.printed.loss)
            throughput = printed.throughput or seen.printed.throughput
            seen.printed = printed._replace(throughput=throughput)
        _see_step(run, log, seen)
        if is_first:
            # A rank may have been silent before anybody looked.
            written_at = max(map(reading.written_at, (*log.paths, run.heartbeat_path(log))))
            seen.lived_at = now - max(0.0, time.time() - (written_at or time.time()))
        state, is_odd = _state(log, used, is_alive=is_alive, quiet_s=now - seen.lived_at)
        if state == "running" and self._lags(run, log):
            state, is_odd = "slow", True
        cpu_before = seen.cpu
        seen.cpu = None if used is None else (now, used.cpu_s)
        axes = self._axes(run, log) if log.label.startswith("rank ") else None
        speed = progress.steps_per_second(seen.steps)
        # A rank that was at its next step for longer than at any before has no speed.
        is_late = now - seen.stepped_at >= max(_SILENT_S, 2 * _last_interval(seen.steps))
        return RankRow(
            label=log.label,
            rank=log.rank,
            state=state,
            host="",
            device="",
            pid=log.pid,
            cpu_percent=None if seen.cpu is None else usage.percent(cpu_before, seen.cpu),
            memory_bytes=None if used is None else used.resident_bytes,
            step=seen.step,
            steps_per_s=(0.0 if speed and is_late else speed)
            if is_alive and log.ended_at is None
            else None,
            loss=seen.printed.loss,
            throughput=seen.printed.throughput,
            line=seen.printed.line,
            is_odd=is_odd,
            place=axes.place(log.rank) if axes is not None and log.rank is not None else "",
            total_steps=seen.printed.total,
            logs=log.paths,
            stacks=os.path.join(run.path, names.stacks(log.file_key)),
        )

    def _axes(self, run: runs.Run, log: runs.LogRecord) -> rankfile.RankAxes | None:
        """Return fleet's topology, as the ranks of RUN recorded it: all of them the same."""
        if run.path not in self._topologies:
            axes = rankfile.topology([os.path.join(run.path, names.rank_records(f"{log.rank}"))])
            if axes is not None:
                self._topologies[run.path] = axes
        return self._topologies.get(run.path)

    def _lags(self, run: runs.Run, log: runs.LogRecord) -> bool:
        """Whether the launcher has recently reported this rank as a straggler."""
        since = time.time() - _STRAGGLER_S
        return any(
            event.time >= since
            and event.more.get("what") == "straggler"
            and log.label in reading.texts(event.more.get("who"))
            for event in self._notices.get(run.path, ())
        )


def _see_step(run: runs.Run, log: runs.LogRecord, seen: _LogState) -> None:
    """Record a rank's newest step, from its heartbeat or else from its output."""
    beat = run.heartbeat(log)
    points = () if beat is None else beat.points
    written_at = max(map(reading.written_at, log.paths)) or time.time()
    at, step = points[-1] if points else (written_at, seen.printed.step)
    newest = beat.step if beat is not None and points else step
    seen.step = seen.step if newest is None else newest
    if step is None or (seen.steps and seen.steps[-1][1] == step):
        return
    seen.lived_at = seen.stepped_at = time.monotonic()
    if seen.steps and step < seen.steps[-1][1]:
        # A new epoch starts over.
        seen.steps.clear()
    elif not seen.steps:
        # The first update has a time, too, whenever the rank is looked at first.
        seen.steps += points[:-1]
    seen.steps.append((at, step))
    while len(seen.steps) > 2 and at - seen.steps[1][0] >= _WINDOW_S:  # two give a rate
        seen.steps.pop(0)


def _last_interval(steps: Sequence[tuple[float, int]]) -> float:
    return steps[-1][0] - steps[-2][0] if len(steps) > 1 else 0.0


def _state(
    log: runs.LogRecord, used: usage.Usage | None, *, is_alive: bool, quiet_s: float
) -> tuple[str, bool]:
    """Return the state of a process in one or two words, and whether it is odd."""
    if log.ended_at is not None:
        if log.signal:
            return ("failed" if log.has_failed else "ended", log.has_failed)
        return (f"exit {log.code}", log.has_failed) if log.code else ("done", False)
    if not is_alive:
        return "lost", True
    if used is not None and used.state in "Tt":
        return "stopped", True
    if quiet_s >= _SILENT_S:
        return f"silent {format_duration(quiet_s, is_short=True)}", False
    return "running", False


def compared(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return ROWS, with silent ranks marked as behind or waiting by their steps."""
    steps = [row.step for row in rows if row.state.startswith(("running", "silent", "slow"))]
    known = [step for step in steps if step is not None]
    # Ranks report at different moments.
    if len(known) < len(steps) or not known or max(known) - min(known) <= 1:
        return list(rows)
    marked = []
    for row in rows:
        if row.state.startswith("silent") and row.step == min(known):
            marked.append(row._replace(state=row.state.replace("silent", "behind"), is_odd=True))
        elif row.state.startswith("silent") and row.step == max(known):
            marked.append(row._replace(state=row.state.replace("silent", "waits")))
        else:
            marked.append(row)
    return marked


def _phase(job_runs: Sequence[runs.Run], rows: Sequence[RankRow], *, is_over: bool) -> str:
    if is_over:
        return "over"
    if not any(run.logs for run in job_runs):
        return "starting"
    ended = ("done", "failed", "ended", "lost", "exit ")
    return "stopping" if all(row.state.startswith(ended) for row in rows) else "running"


def _waiting(found_runs: Sequence[runs.Run], rows: list[RankRow]) -> list[RankRow]:
    """Return ROWS with the collectives in which ranks wait, as far as they are recorded."""
    # If all ranks make steps there is nothing to read.
    if len(rows) > _MOST_RECORDED or not any(row.state.startswith("silent") for row in rows):
        return rows
    records: dict[int, flightfile.FlightRecord] = {}
    for run in found_runs:
        records.update(run.collectives())
    now = time.time()
    waits = flight.waiting(records, now - flight.LATE_S)
    job = flight.JobRanks(flightfile.ranks_in(records.values()))
    texts = {rank: _waited(*waited, job, now) for rank, waited in waits.items()}
    return [
        row._replace(waits=texts[row.rank])
        if row.rank in texts and row.label.startswith("rank ")
        else row
        for row in rows
    ]


def _waited(
    collective: flightfile.Collective,
    missing: tuple[int, ...],
    job: flight.JobRanks,
    now: float,
) -> str:
    """Return in which collective a rank waits: `all_reduce 3 for rank 2, 12 s`."""
    group = flight.of(collective.channel, job)
    where = "" if group == "of all ranks" else f" {group}"
    whom = f" for rank{'s' * (len(missing) > 1)} {format_ranges(missing)}" if missing else ""
    waited_s = max(0.0, now - collective.issued_at)
    return f"{collective.operation} {collective.number}{where}{whom}, {waited_s:.0f} s"


def _with(row: RankRow, measured: metricsfile.MetricsRecord, *, is_here: bool) -> RankRow:
    """Return ROW with what its launcher has MEASURED: of GPUs, and of other hosts' processes."""
    used = next((rank for rank in measured.ranks if rank.pid == row.pid), None)
    if used is not None and not is_here:
        row = row._replace(cpu_percent=used.cpu_percent, memory_bytes=used.memory_bytes)
    gpus = [gpu for gpu in measured.gpus if row.rank is not None and row.rank in gpu.ranks]
    return row._replace(
        gpu_percent=_total(gpu.use_percent for gpu in gpus),
        gpu_memory_bytes=_whole(_total(gpu.memory_used_bytes for gpu in gpus)),
        power_w=_total(gpu.power_w for gpu in gpus),
    )


def eta_s(rows: Sequence[RankRow]) -> float | None:
    """Return the seconds until the slowest of ROWS reaches its last step; None if unknown.

    While one is silent before that, nobody knows when the job will end.
    """
    left = [
        ((row.total_steps - row.step) / row.steps_per_s if row.steps_per_s else math.inf)
        for row in rows
        if row.total_steps
        and row.step is not None
        and row.step < row.total_steps
        and row.steps_per_s is not None
    ]
    longest = max(left, default=math.inf)
    return None if math.isinf(longest) else longest


def totals(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return the totals of ROWS per host, in the order of their first ranks.

    The use of GPUs is averaged.
    """
    sums = []
    for host in dict.fromkeys(row.host for row in rows):
        own = [row for row in rows if row.host == host]
        gpus = [row.gpu_percent for row in own if row.gpu_percent is not None]
        steps = [row.step for row in own if row.step is not None]
        speeds = [row.steps_per_s for row in own if row.steps_per_s is not None]
        sums.append(
            RankRow(
                label=host,
                rank=None,
                state=f"{len(own)} ranks",
                # The label names the host.
                host="",
                device="",
                pid=None,
                cpu_percent=_total(row.cpu_percent for row in own),
                memory_bytes=_whole(_total(row.memory_bytes for row in own)),
                gpu_percent=sum(gpus) / len(gpus) if gpus else None,
                gpu_memory_bytes=_whole(_total(row.gpu_memory_bytes for row in own)),
                power_w=_total(row.power_w for row in own),
                step=min(steps, default=None),
                steps_per_s=min(speeds, default=None),
                is_odd=any(row.is_odd for row in own),
            )
        )
    return sums


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
