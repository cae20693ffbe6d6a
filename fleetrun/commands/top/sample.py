"""The state of a run's ranks, as the files of its run directory tell it."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fleetrun.commands import job_commands
from fleetrun.postmortem import flight
from fleetrun.rundir import flightfile, names, progress, reading, runs
from fleetrun.rundir.metricsfile import MetricsRecord
from fleetrun.rundir.progress import Progress
from fleetrun.rundir.rankfile import RankAxes
from fleetrun.text import format_duration, format_ranges

# A rank without a new step or line for this long is silent.
_SILENT_S = 10.0
# Older measurements are not shown.
_OLD_S = 60.0
# The collectives of larger jobs take too long to read at each look.
_MOST_RECORDED = 256
# The least time over which steps are averaged.
_WINDOW_S = 10.0


class RankRow(NamedTuple):
    """One process; None: unknown."""

    label: str
    rank: int | None
    # running, silent, stopped, done, failed, ended, and so on.
    state: str
    host: str
    device: str
    pid: int | None = None
    # Of the newest line of metrics.jsonl.
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: float | None = None
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
    # starting, running or over.
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


class Sampler:
    """Samples the runs CHOSEN of one job; PATTERN extracts step and loss from log lines."""

    def __init__(self, chosen: Sequence[runs.Run], *, pattern: re.Pattern[bytes] | None) -> None:
        self._runs = list(chosen)
        self._reader = runs.RunReader()
        self._pattern = pattern
        # By log: what it has told last, and its steps with their times within the window.
        self._progress: dict[str, Progress] = {}
        self._steps: dict[str, list[tuple[float, int]]] = {}
        # By run: fleet's topology, once a rank has recorded it.
        self._axes: dict[str, RankAxes] = {}

    @property
    def run_dirs(self) -> list[str]:
        """The run directories of the job's hosts."""
        return [run.path for run in self._runs]

    def sample(self) -> Snapshot:
        """Return the current state of the job."""
        has_launcher = [run.is_running for run in self._runs]
        self._runs = [self._reader.read(run.path) for run in self._runs]
        # The launcher may still write something.
        pairs = list(zip(self._runs, has_launcher, strict=True))
        alive = {run.path for run, has in pairs if has and run.finished_at is None}
        rows = [row for run in self._runs for row in self._rows(run, is_alive=run.path in alive)]
        rows.sort(key=lambda row: (row.rank is None, not row.label.startswith("rank "), row.rank))
        rows = compared(_waiting(self._runs, rows) if alive else rows)
        first, now = self._runs[0], time.time()
        end = (
            now if alive else max((run.finished_at or 0.0 for run in self._runs), default=0) or now
        )
        bad = next((run for run in self._runs if run.exit_code), first)
        warnings = [event for run in self._runs for event in run.events if event.event == "warning"]
        newest = max(warnings, key=lambda event: event.time, default=None)
        return Snapshot(
            job=job_commands.name_of(first.name, is_known=bool(first.job_id)),
            run=first.path,
            phase="over" if not alive else "running" if rows else "starting",
            seconds=max(0.0, end - min(run.started_at or now for run in self._runs)),
            attempt=max(run.attempt for run in self._runs),
            max_restarts=None if first.plan is None else first.plan.max_restarts,
            hosts=max(len(self._runs), 1 if first.plan is None else len(first.plan.nodes)),
            rows=tuple(rows),
            notice="" if newest is None else reading.text(newest.more.get("text")),
            verdict="" if alive else bad.verdict or "its launcher was killed",
            exit_code=None if alive else bad.exit_code,
            eta_s=eta_s(rows) if alive else None,
        )

    def _rows(self, run: runs.Run, *, is_alive: bool) -> Iterator[RankRow]:
        """Yield the row of each process of RUN, in its newest attempt."""
        logs = {log.process: log for log in run.logs}
        specs = {spec.name: spec for spec in run.plan.processes} if run.plan is not None else {}
        measured = run.newest_metrics() if is_alive else None
        if measured is not None and measured.time < time.time() - _OLD_S:
            measured = None
        axes = self._axes.get(run.path) or run.axes()
        if axes is not None:
            self._axes[run.path] = axes
        for name in dict.fromkeys((*logs, *specs)):
            log, spec = logs.get(name), specs.get(name)
            rank = log.rank if log is not None else spec.rank if spec is not None else None
            is_trainer = rank is not None and names.label_of(name).startswith("rank ")
            row = RankRow(
                label=names.label_of(name),
                rank=rank,
                # It waits for the processes that it depends on.
                state="to start" if is_alive else "never ran",
                host=run.host or socket.gethostname(),
                device=",".join(spec.devices if spec is not None else ()) or "cpu",
                place=axes.place(rank)
                if axes is not None and rank is not None and is_trainer
                else "",
            )
            if log is not None:
                used = measured if log.ended_at is None else None
                row = self._filled(row, run, log, used, is_alive=is_alive)
            yield row

    def _filled(
        self,
        row: RankRow,
        run: runs.Run,
        log: runs.LogRecord,
        measured: MetricsRecord | None,
        *,
        is_alive: bool,
    ) -> RankRow:
        """Return ROW with what is known of the process of LOG."""
        now = time.time()
        told = self._told(run, log)
        lived_at = max(map(reading.written_at, (*log.paths, run.heartbeat_path(log)))) or now
        used = next((r for r in measured.ranks if r.pid == log.pid), None) if measured else None
        gpus = [g for g in measured.gpus if log.rank in g.ranks] if measured else []
        earlier = (measured.time, used.step) if measured and used and used.step else None
        steps = self._seen_steps(run, log, told, earlier)
        is_stopped = used is not None and used.state in "Tt"
        state, is_odd = _state(
            log, is_alive=is_alive, is_stopped=is_stopped, quiet_s=now - lived_at
        )
        speed = progress.steps_per_second(steps) if is_alive and log.ended_at is None else None
        # A rank that is at its next step for longer than at any before has no speed.
        last_s = steps[-1][0] - steps[-2][0] if len(steps) > 1 else 0.0
        if speed and now - steps[-1][0] >= max(_SILENT_S, 2 * last_s):
            speed = 0.0
        return row._replace(
            state=state,
            pid=log.pid,
            cpu_percent=None if used is None else used.cpu_percent,
            memory_bytes=None if used is None else used.memory_bytes,
            gpu_percent=_total(gpu.use_percent for gpu in gpus),
            gpu_memory_bytes=_total(gpu.memory_used_bytes for gpu in gpus),
            power_w=_total(gpu.power_w for gpu in gpus),
            step=told.step,
            steps_per_s=speed,
            loss=told.loss,
            throughput=told.throughput,
            line=told.line,
            is_odd=is_odd,
            total_steps=told.total,
            logs=log.paths,
            stacks=run.file(names.stacks(log.file_key)),
        )

    def _told(self, run: runs.Run, log: runs.LogRecord) -> Progress:
        """Return what the process of LOG has told; what has left the log's end is still known."""
        told, before = run.progress(log, self._pattern), self._progress.get(log.path, Progress())
        told = told._replace(
            step=before.step if told.step is None else told.step,
            total=before.total if told.total is None else told.total,
            loss=before.loss if told.loss is None else told.loss,
            throughput=told.throughput or before.throughput,
        )
        self._progress[log.path] = told
        return told

    def _seen_steps(
        self,
        run: runs.Run,
        log: runs.LogRecord,
        told: Progress,
        earlier: tuple[float, int] | None,
    ) -> Sequence[tuple[float, int]]:
        """Return times and steps of the process of LOG within the window, the newest last.

        Of steps that are only printed, the one EARLIER was measured before this command began.
        """
        beat = run.heartbeat(log)
        points = () if beat is None else beat.points
        if not points and told.step is not None:
            now = max(map(reading.written_at, log.paths)), told.step
            points = (now,) if earlier is None or earlier >= now else (earlier, now)
        steps = self._steps.setdefault(log.path, [])
        if steps and points and points[-1][1] < steps[-1][1]:
            # A new epoch starts over.
            steps.clear()
        steps += [point for point in points if not steps or point[1] > steps[-1][1]]
        # Two give a speed.
        while len(steps) > 2 and steps[-1][0] - steps[1][0] >= _WINDOW_S:
            steps.pop(0)
        return steps


def _state(
    log: runs.LogRecord, *, is_alive: bool, is_stopped: bool, quiet_s: float
) -> tuple[str, bool]:
    """Return the state of a process in one or two words, and whether it is odd."""
    if log.ended_at is not None:
        if log.signal:
            return ("failed" if log.has_failed else "ended", log.has_failed)
        return (f"exit {log.code}", log.has_failed) if log.code else ("done", False)
    if not is_alive or is_stopped:
        return ("stopped" if is_alive else "lost"), True
    if quiet_s >= _SILENT_S:
        return f"silent {format_duration(quiet_s, is_short=True)}", False
    return "running", False


def compared(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return ROWS, with silent ranks marked as behind or waiting by their steps."""
    steps = [row.step for row in rows if row.state.startswith(("running", "silent"))]
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


def _waiting(job_runs: Sequence[runs.Run], rows: list[RankRow]) -> list[RankRow]:
    """Return ROWS with the collectives in which ranks wait, as far as they are recorded."""
    # If all ranks make steps there is nothing to read.
    if len(rows) > _MOST_RECORDED or not any(row.state.startswith("silent") for row in rows):
        return rows
    records = {rank: record for run in job_runs for rank, record in run.collectives().items()}
    now = time.time()
    job = flight.JobRanks(flightfile.ranks_in(records.values()))
    texts = {}
    for rank, (collective, missing) in flight.waiting(records, now - flight.LATE_S).items():
        # As `all_reduce 3 for rank 2, 12 s`.
        group = flight.of(collective.channel, job)
        where = "" if group == "of all ranks" else f" {group}"
        whom = f" for rank{'s' * (len(missing) > 1)} {format_ranges(missing)}" if missing else ""
        waited_s = max(0.0, now - collective.issued_at)
        texts[f"rank {rank}"] = (
            f"{collective.operation} {collective.number}{where}{whom}, {waited_s:.0f} s"
        )
    return [row._replace(waits=texts.get(row.label, "")) for row in rows]


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


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
