"""Samples the state of a run's ranks: from its run directory, /proc and the GPU driver."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleetrun import conversion
from fleetrun.commands import ps
from fleetrun.postmortem import flight
from fleetrun.probe import jobs, usage
from fleetrun.probe.gpumeter import GpuMeter
from fleetrun.records import (
    eventfile,
    flightfile,
    heartbeat,
    metricsfile,
    names,
    progress,
    rankfile,
    reading,
    runs,
)
from fleetrun.run import proc

_TOTAL_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
# A rank without a new step or line for this long is silent.
_SILENT_S = 10.0
# How long a straggler stays marked: the launcher reports it only from time to time.
_STRAGGLER_S = 60.0
# Older measurements of other hosts are not shown.
_OLD_S = 60.0
# The samples in a sparkline.
_MOST_LOOKS = 16
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
    gpu_memory_total_bytes: int | None = None
    # Use of its GPU, else of processors, in percent: the last samples, oldest first.
    use: tuple[float, ...] = ()
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
    # running, waiting, stopping or over.
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
    # The memory of this host.
    memory_total_bytes: int | None = None


class _LogState:
    """The state of one log between samples."""

    def __init__(self) -> None:
        self.size = -1
        self.progress = progress.Progress()
        # Monotonic time of the last sign of life.
        self.lived_at = time.monotonic()
        # Steps with their times of writing, oldest first, within the window.
        self.steps: list[tuple[float, int]] = []
        # The last one, which may have no time.
        self.step: int | None = None
        # Monotonic time at which the last step was seen, as clocks of other hosts may differ.
        self.stepped_at = self.lived_at
        self.cpu: tuple[float, float] | None = None
        self.use: tuple[float, ...] = ()


class Sampler:
    """Samples the runs CHOSEN of one job; PATTERN extracts step and loss from log lines."""

    def __init__(
        self,
        chosen: Sequence[runs.Run],
        *,
        pattern: re.Pattern[bytes] | None,
        period_s: float,
    ) -> None:
        self._runs = list(chosen)
        self._reader = runs.RunReader()
        self._pattern = pattern
        self._notices: dict[str, list[eventfile.EventRecord]] = {}
        self._logs: dict[str, _LogState] = {}
        self._period_s = period_s
        self._meter: GpuMeter | None = None
        self._here = socket.gethostname()
        # By run: fleet's topology, once a rank has recorded it.
        self._topologies: dict[str, rankfile.RankAxes] = {}

    def close(self) -> None:
        """Stop reading the driver."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None

    def ask_for_stacks(self) -> int:
        """Ask the launchers on this host for stacks of their ranks; return their number."""
        return jobs.ask_for_stacks([run.path for run in self._runs])

    def sample(self) -> Snapshot:
        """Return the current state of the job."""
        has_launcher = [runs.is_running(run.path) for run in self._runs]
        self._refresh()
        # The launcher may still write something.
        is_running = [
            alive and run.finished_at is None
            for alive, run in zip(has_launcher, self._runs, strict=True)
        ]
        rows: list[RankRow] = []
        for run, alive in zip(self._runs, is_running, strict=True):
            rows += self._placed(run, list(self._rows(run, is_alive=alive)))
        rows = _waiting(self._runs, rows) if any(is_running) else rows
        rows.sort(key=lambda row: (row.rank is None, not row.label.startswith("rank "), row.rank))
        rows = compared(rows)
        first = self._runs[0]
        began = min((run.started_at or time.time() for run in self._runs), default=time.time())
        ended = [run.finished_at for run in self._runs if run.finished_at is not None]
        is_over = not any(is_running)
        end = max(ended) if is_over and ended else time.time()
        bad = next((run for run in self._runs if run.exit_code), first)
        return Snapshot(
            job=ps.called(first.name, is_known=bool(first.job_id)),
            run=first.path,
            phase=_phase(self._runs, rows, is_over=is_over),
            seconds=max(0.0, end - began),
            attempt=max(run.attempt for run in self._runs),
            max_restarts=None if first.plan is None else first.plan.max_restarts,
            hosts=max(len(self._runs), 1 if first.plan is None else len(first.plan.nodes)),
            rows=tuple(rows),
            notice=self._notice(),
            verdict=(bad.verdict or "its launcher was killed") if is_over else "",
            exit_code=bad.exit_code if is_over else None,
            eta_s=None if is_over else eta_s(rows),
            memory_total_bytes=_TOTAL_BYTES,
        )

    def _refresh(self) -> None:
        """Read changed run directories again."""
        for place, before in enumerate(self._runs):
            run = self._runs[place] = self._reader.read(before.path)
            if run is not before:
                events = eventfile.read(os.path.join(run.path, names.EVENTS))
                self._notices[run.path] = [event for event in events if event.event == "warning"]

    def _placed(self, run: runs.Run, rows: list[RankRow]) -> list[RankRow]:
        """Return ROWS with their places in fleet's topology, as the ranks of RUN recorded it."""
        ranks = [row.rank for row in rows if row.rank is not None and row.label[:5] == "rank "]
        if ranks and run.path not in self._topologies:
            # All ranks record the same.
            axes = rankfile.topology([os.path.join(run.path, names.rank_records(f"{ranks[0]}"))])
            if axes is not None:
                self._topologies[run.path] = axes
        known = self._topologies.get(run.path)
        return [
            row._replace(place=known.place(row.rank)) if known and row.rank in ranks else row
            for row in rows
        ]

    def _rows(self, run: runs.Run, *, is_alive: bool) -> Iterable[RankRow]:
        """Yield the row of each process of RUN, in its newest attempt."""
        newest = {log.process: log for log in run.logs}
        specs = {spec.name: spec for spec in run.plan.processes} if run.plan is not None else {}
        is_here = is_alive and run.launcher_pid is not None and _is_launcher(run.launcher_pid)
        alive = [log.pid for log in newest.values() if log.ended_at is None and log.pid is not None]
        used = usage.of(alive) if is_here else {}
        planned = [device for spec in specs.values() for device in spec.devices]
        gpus = self._gpus(planned, is_here=is_here)
        host = run.host or self._here
        reported = None if is_here or not is_alive else _other_hosts(run)
        for name, log in newest.items():
            spec = specs.get(name)
            devices = spec.devices if spec is not None else ()
            row = self._row(
                run,
                log,
                is_alive=is_alive,
                host=host,
                devices=devices,
                used=used.get(log.pid) if log.pid is not None and log.ended_at is None else None,
                gpus=[gpus[name] for name in devices if name in gpus and log.ended_at is None],
            )
            yield row if reported is None or log.ended_at is not None else _with(row, reported)
        for name, spec in specs.items():
            if name not in newest:
                # It waits for the processes that it depends on.
                state = "to start" if is_alive else "never ran"
                device = ",".join(spec.devices)
                yield RankRow(names.label_of(name), spec.rank, state, host, device, None)

    def _row(
        self,
        run: runs.Run,
        log: runs.LogRecord,
        *,
        is_alive: bool,
        host: str,
        devices: Sequence[str],
        used: usage.Usage | None,
        gpus: Sequence[metricsfile.GpuUsage],
    ) -> RankRow:
        now = time.monotonic()
        state_of_log = self._logs.setdefault(log.path, _LogState())
        size = sum(map(reading.size, log.paths))
        is_first = state_of_log.size == -1
        if size != state_of_log.size:
            state_of_log.size = size
            printed = progress.of(progress.tail(log), self._pattern)
            # Values that have left the tail are still the newest.
            state_of_log.progress = progress.Progress(
                state_of_log.progress.step if printed.step is None else printed.step,
                state_of_log.progress.loss if printed.loss is None else printed.loss,
                printed.line,
                state_of_log.progress.total if printed.step is None else printed.total,
                printed.throughput or state_of_log.progress.throughput,
            )
            state_of_log.lived_at = now
        self._see_step(run, log, state_of_log)
        if is_first:
            # A rank may have been silent before anybody looked.
            written_at = max(map(reading.written_at, (*log.paths, progress.beat(run.path, log))))
            state_of_log.lived_at = now - max(0.0, time.time() - (written_at or time.time()))
        is_over = log.ended_at is not None
        state, is_odd = _state(log, used, is_alive=is_alive, quiet_s=now - state_of_log.lived_at)
        if not is_over and state == "running" and self._lags(run, log):
            state, is_odd = "slow", True
        row = RankRow(
            label=log.label,
            rank=log.rank,
            state=state,
            host=host,
            device=",".join(devices) or "cpu",
            pid=log.pid,
            cpu_percent=None if used is None else _percent(state_of_log, used.cpu_s, now),
            memory_bytes=None if used is None else used.resident_bytes,
            step=state_of_log.step,
            steps_per_s=rate(state_of_log.steps, now - state_of_log.stepped_at)
            if is_alive and not is_over
            else None,
            loss=state_of_log.progress.loss,
            throughput=state_of_log.progress.throughput,
            line=state_of_log.progress.line,
            is_odd=is_odd,
            total_steps=state_of_log.progress.total,
            logs=log.paths,
            stacks=os.path.join(run.path, names.stacks(log.file_key)),
        )
        row = _with_gpus(row, gpus)
        used_percent = row.cpu_percent if row.gpu_percent is None else row.gpu_percent
        if used_percent is not None:
            state_of_log.use = (*state_of_log.use, used_percent)[-_MOST_LOOKS:]
        return row._replace(use=state_of_log.use)

    @staticmethod
    def _see_step(run: runs.Run, log: runs.LogRecord, state: _LogState) -> None:
        """Record a rank's newest step, from its heartbeat or else from its output."""
        points = progress.beaten(run.path, log)
        written_at = max(map(reading.written_at, log.paths)) or time.time()
        at, step = points[-1] if points else (written_at, state.progress.step)
        newest = heartbeat.read_step(progress.beat(run.path, log)) if points else step
        state.step = state.step if newest is None else newest
        if step is None or (state.steps and state.steps[-1][1] == step):
            return
        state.lived_at = state.stepped_at = time.monotonic()
        if state.steps and step < state.steps[-1][1]:
            # A new epoch starts over.
            state.steps.clear()
        elif not state.steps:
            # The first update has a time, too, whenever the rank is looked at first.
            state.steps += points[:-1]
        state.steps.append((at, step))
        while len(state.steps) > 2 and at - state.steps[1][0] >= _WINDOW_S:  # two give a rate
            state.steps.pop(0)

    def _lags(self, run: runs.Run, log: runs.LogRecord) -> bool:
        """Whether the launcher has recently reported this rank as a straggler."""
        since = time.time() - _STRAGGLER_S
        return any(
            event.time >= since
            and event.more.get("what") == "straggler"
            and log.label in reading.texts(event.more.get("who"))
            for event in self._notices.get(run.path, ())
        )

    def _notice(self) -> str:
        """Return the text of the newest warning."""
        events = [event for notices in self._notices.values() for event in notices]
        newest = max(events, key=lambda event: event.time, default=None)
        return "" if newest is None else reading.text(newest.more.get("text"))

    def _gpus(self, devices: Sequence[str], *, is_here: bool) -> dict[str, metricsfile.GpuUsage]:
        """Return the GPUs by their names in plans."""
        if not is_here or not any(name.startswith("gpu:") for name in devices):
            return {}
        if self._meter is None:
            self._meter = GpuMeter(self._period_s)
        by_name: dict[str, metricsfile.GpuUsage] = {}
        for gpu in self._meter.newest():
            by_name[f"gpu:{gpu.number}"] = by_name[f"gpu:{gpu.uuid}"] = gpu
        return by_name


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
        return f"silent {conversion.duration(quiet_s, is_short=True)}", False
    return "running", False


def compared(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return ROWS, with silent ranks marked as behind or waiting by their steps."""
    steps = [row.step for row in rows if row.state.startswith(("running", "silent", "slow"))]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps) or len(set(known)) < 2:
        return list(rows)
    ahead, behind = max(known), min(known)
    if ahead - behind <= 1:
        # Ranks report at different moments.
        return list(rows)
    marked = []
    for row in rows:
        if row.state.startswith("silent") and row.step == behind:
            marked.append(row._replace(state=row.state.replace("silent", "behind"), is_odd=True))
        elif row.state.startswith("silent") and row.step == ahead:
            marked.append(row._replace(state=row.state.replace("silent", "waits")))
        else:
            marked.append(row)
    return marked


def _phase(job_runs: Sequence[runs.Run], rows: Sequence[RankRow], *, is_over: bool) -> str:
    if is_over:
        return "over"
    if not any(log for run in job_runs for log in run.logs):
        return "starting"
    alive = [row for row in rows if row.state not in {"done", "failed", "ended", "lost"}]
    return "running" if any(not row.state.startswith("exit ") for row in alive) else "stopping"


def _waiting(found_runs: Sequence[runs.Run], rows: list[RankRow]) -> list[RankRow]:
    """Return ROWS with the collectives in which ranks wait, as far as they are recorded."""
    # If all ranks make steps there is nothing to read.
    if len(rows) > _MOST_RECORDED or not any(row.state.startswith("silent") for row in rows):
        return rows
    records: dict[int, flightfile.FlightRecord] = {}
    for run in found_runs:
        records.update(flightfile.of_folder(run.path, run.generation))
    now = time.time()
    waits = flight.waiting(records, now - flight.LATE_S)
    job = flight.JobRanks(flightfile.ranks_in(records.values()))
    return [
        row._replace(waits=_waited(*waits[row.rank], job, now))
        if row.rank in waits and row.label.startswith("rank ")
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
    whom = f" for rank{'s' * (len(missing) > 1)} {conversion.ranges(missing)}" if missing else ""
    waited_s = max(0.0, now - collective.issued_at)
    return f"{collective.operation} {collective.number}{where}{whom}, {waited_s:.0f} s"


def _is_launcher(pid: int) -> bool:
    """Whether PID is a launcher on this host; a pid of another host means nothing here."""
    return any("fleetrun" in word for word in proc.argv(pid))


def _other_hosts(run: runs.Run) -> metricsfile.MetricsRecord | None:
    """Return the newest measurement of RUN's host, if it is recent."""
    newest = metricsfile.newest(os.path.join(run.path, names.METRICS))
    return newest if newest is not None and newest.time >= time.time() - _OLD_S else None


def _with(row: RankRow, reported: metricsfile.MetricsRecord) -> RankRow:
    """Return ROW with the usage that its host has REPORTED."""
    used = [rank for rank in reported.ranks if rank.pid == row.pid]
    gpus = [gpu for gpu in reported.gpus if row.rank is not None and row.rank in gpu.ranks]
    row = row._replace(
        cpu_percent=used[0].cpu_percent if used else None,
        memory_bytes=used[0].memory_bytes if used else None,
    )
    return _with_gpus(row, gpus)


def _with_gpus(row: RankRow, gpus: Sequence[metricsfile.GpuUsage]) -> RankRow:
    """Return ROW with the total usage of its GPUs."""
    return row._replace(
        gpu_percent=_total(gpu.use_percent for gpu in gpus),
        gpu_memory_bytes=_whole(_total(gpu.memory_used_bytes for gpu in gpus)),
        gpu_memory_total_bytes=_whole(_total(gpu.memory_total_bytes for gpu in gpus)),
        power_w=_total(gpu.power_w for gpu in gpus),
    )


def _percent(log: _LogState, cpu_s: float, now: float) -> float | None:
    """Return the processor use since the last sample, in percent."""
    before, log.cpu = log.cpu, (now, cpu_s)
    return usage.percent(before, log.cpu)


def rate(steps: Sequence[tuple[float, int]], waited_s: float) -> float | None:
    """Return the steps per second by STEPS: times in seconds, and the step at each.

    WAITED_S are the seconds since the last one. A late step lowers the rate, which is 0 after ten
    seconds without a step, or after twice the time of the last one if that is longer.

    >>> steps = [(0.0, 0), (5.0, 10), (10.0, 20)]
    >>> [rate(steps, waited_s) for waited_s in (1.0, 5.0, 10.0)]
    [2.0, 2.0, 0.0]
    >>> rate([(0.0, 1), (30.0, 2)], 50.0)
    0.025
    """
    speed = progress.steps_per_second(steps)
    if speed is None:
        return None
    first_at, first = progress.without_first_step(steps)[0]
    (before_at, before), (last_at, last) = steps[-2:]
    if waited_s >= max(_SILENT_S, 2 * (last_at - before_at)):
        return 0.0
    # As if the same number of steps as last time were made just now.
    at_best = (2 * last - before - first) / (last_at - first_at + waited_s)
    return min(speed, at_best)


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
    hosts = dict.fromkeys(row.host for row in rows)
    for host in hosts:
        own = [row for row in rows if row.host == host]
        gpus = [row.gpu_percent for row in own if row.gpu_percent is not None]
        looks = min((len(row.use) for row in own if row.use), default=0)
        use = [row.use[-looks:] for row in own if row.use]
        sums.append(
            RankRow(
                label=host if len(hosts) > 1 else "total",
                rank=None,
                # The label names the host.
                host="",
                state=conversion.counted(len(own), "process"),
                device="",
                pid=None,
                cpu_percent=_total(row.cpu_percent for row in own),
                memory_bytes=_whole(_total(row.memory_bytes for row in own)),
                gpu_percent=sum(gpus) / len(gpus) if gpus else None,
                gpu_memory_bytes=_whole(_total(row.gpu_memory_bytes for row in own)),
                gpu_memory_total_bytes=_whole(_total(row.gpu_memory_total_bytes for row in own)),
                power_w=_total(row.power_w for row in own),
                step=min((row.step for row in own if row.step is not None), default=None),
                steps_per_s=min(
                    (row.steps_per_s for row in own if row.steps_per_s is not None), default=None
                ),
                is_odd=any(row.is_odd for row in own),
                use=tuple(sum(sample) / len(use) for sample in zip(*use, strict=True)),
            )
        )
    return sums


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
