"""The state of a run's ranks, as the files of its run directory tell it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleetrun.rundir import metricsfile, names, progress, reading, runs
from fleetrun.rundir.metricsfile import GpuUsage, MetricsRecord, RankUse

# A rank without a new step or line for this long is silent.
_SILENT_S = 10.0
# Older measurements are not shown.
_OLD_S = 60.0
# The steps over which a speed is averaged.
_WINDOW = 10


class RankRow(NamedTuple):
    """One process; None: unknown."""

    label: str
    rank: int | None
    # running, silent, stopped, done, failed, ended, and so on.
    state: str
    host: str
    device: str
    pid: int | None = None
    # By the newest line of metrics.jsonl.
    use: RankUse | None = None
    gpus: tuple[GpuUsage, ...] = ()
    step: int | None = None
    steps_per_s: float | None = None
    loss: float | None = None
    line: str = ""
    # Whether it needs attention.
    is_odd: bool = False
    # Its place in fleet's topology: `dp 1, mp 0`.
    place: str = ""


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


class Sampler:
    """Samples the runs CHOSEN of one job."""

    def __init__(self, chosen: Sequence[runs.Run]) -> None:
        self._runs = list(chosen)
        self._reader = runs.RunReader()
        # By log: the last steps with their times.
        self._steps: dict[str, list[tuple[float, int]]] = {}

    def sample(self) -> Snapshot:
        """Return the current state of the job."""
        has_launcher = [run.is_running for run in self._runs]
        self._runs = [self._reader.read(run.path) for run in self._runs]
        # The launcher may still write something.
        pairs = list(zip(self._runs, has_launcher, strict=True))
        alive = {run.path for run, has in pairs if has and run.finished_at is None}
        rows = [row for run in self._runs for row in self._rows(run, is_alive=run.path in alive)]
        rows.sort(key=lambda row: (row.rank is None, not row.label.startswith("rank "), row.rank))
        first, now = self._runs[0], time.time()
        end = now if alive else max(run.finished_at or 0.0 for run in self._runs) or now
        bad = next((run for run in self._runs if run.exit_code), first)
        warnings = [event for run in self._runs for event in run.events if event.event == "warning"]
        newest = max(warnings, key=lambda event: event.time, default=None)
        return Snapshot(
            job=names.job_name(first.name) if first.job_id else first.name,
            run=first.path,
            phase="over" if not alive else "running" if rows else "starting",
            seconds=max(0.0, end - min(run.started_at or now for run in self._runs)),
            attempt=max(run.attempt for run in self._runs),
            max_restarts=None if first.plan is None else first.plan.max_restarts,
            hosts=max(len(self._runs), 1 if first.plan is None else len(first.plan.nodes)),
            rows=tuple(compared(rows)),
            notice="" if newest is None else reading.text(newest.more.get("text")),
            verdict="" if alive else bad.verdict or "its launcher was killed",
            exit_code=None if alive else bad.exit_code,
        )

    def _rows(self, run: runs.Run, *, is_alive: bool) -> Iterable[RankRow]:
        """Yield the row of each process of RUN, in its newest attempt."""
        logs = {log.process: log for log in run.logs}
        specs = {spec.name: spec for spec in run.plan.processes} if run.plan is not None else {}
        measured = metricsfile.newest(run.file(names.METRICS)) if is_alive else None
        if measured is not None and measured.time < time.time() - _OLD_S:
            measured = None
        axes = run.axes()
        for name in dict.fromkeys((*logs, *specs)):
            log, spec = logs.get(name), specs.get(name)
            rank = log.rank if log is not None else spec.rank if spec is not None else None
            row = RankRow(
                label=names.label_of(name),
                rank=rank,
                # It waits for the processes that it depends on.
                state="to start" if is_alive else "never ran",
                host=run.host or socket.gethostname(),
                device=",".join(spec.devices if spec is not None else ()) or "cpu",
                place="" if axes is None or name != f"trainer.{rank}" else axes.place(rank or 0),
            )
            if log is not None:
                row = self._filled(row, run, log, measured, is_alive=is_alive)
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
        use: RankUse | None = None
        gpus: tuple[GpuUsage, ...] = ()
        if measured is not None and log.ended_at is None:
            use = next((use for use in measured.ranks if use.process == log.process), None)
            gpus = tuple(gpu for gpu in measured.gpus if log.rank in gpu.ranks)
        told = run.progress(log)
        now, written_at = time.time(), max(map(reading.written_at, log.paths))
        quiet_s = now - (max(written_at, reading.written_at(run.heartbeat_path(log))) or now)
        state, is_odd = _state(
            log,
            is_alive=is_alive,
            is_stopped=use is not None and use.state in "Tt",
            quiet_s=quiet_s,
        )
        steps = self._steps.setdefault(log.path, [])
        if not steps and measured is not None and use is not None and use.step:
            # It was measured before this command began.
            steps.append((use.step_at or measured.time, use.step))
        beat = run.heartbeat(log)
        points = beat.points if beat is not None else ()
        if not points and told.step is not None:
            points = ((written_at, told.step),)
        if points and steps and points[-1][1] < steps[-1][1]:
            # A new epoch starts over.
            steps.clear()
        steps += [point for point in points if not steps or point[1] > steps[-1][1]]
        del steps[:-_WINDOW]
        speed = progress.steps_per_second(steps) if is_alive and log.ended_at is None else None
        return row._replace(
            state=state,
            pid=log.pid,
            use=use,
            gpus=gpus,
            step=told.step,
            steps_per_s=0.0 if speed and state != "running" else speed,
            loss=told.loss,
            line=told.line,
            is_odd=is_odd,
        )


def _state(
    log: runs.LogRecord, *, is_alive: bool, is_stopped: bool, quiet_s: float
) -> tuple[str, bool]:
    """Return the state of a process in one or two words, and whether it is odd."""
    if log.ended_at is not None:
        how = f"exit {log.code}" if log.code else "failed" if log.has_failed else "ended"
        return ("done", False) if log.code == 0 and not log.signal else (how, log.has_failed)
    if not is_alive or is_stopped:
        return ("stopped" if is_alive else "lost"), True
    if quiet_s >= _SILENT_S:
        return f"silent {quiet_s:.0f} s", False
    return "running", False


def compared(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return ROWS, with the slowest ranks marked as behind, and those that wait for them."""
    steps = [row.step for row in rows if row.state.startswith(("running", "silent"))]
    known = [step for step in steps if step is not None]
    # Ranks report at different moments.
    if len(known) < len(steps) or not known or max(known) - min(known) <= 1:
        return list(rows)
    marked = []
    for row in rows:
        word, _, quiet = row.state.partition(" ")
        if word in {"running", "silent"} and row.step == min(known):
            marked.append(row._replace(state=f"behind {quiet}".rstrip(), is_odd=True))
        elif word == "silent" and row.step == max(known):
            marked.append(row._replace(state=f"waits {quiet}"))
        else:
            marked.append(row)
    return marked
