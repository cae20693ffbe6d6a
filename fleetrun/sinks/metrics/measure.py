"""Measures a job every few seconds, in a process of its own, and writes metrics.jsonl."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress

import psutil

from fleetrun.host import usage
from fleetrun.host.gpumeter import GpuMeter, ticks
from fleetrun.run import libc, proc
from fleetrun.rundir import metricsfile, names, runs
from fleetrun.rundir.metricsfile import GpuUsage, MetricsRecord, RankUse, System
from fleetrun.sinks.metrics import openmetrics

_NICE = 10
# Each time the file grows by this much, records become half as frequent.
_LENGTHY = 64 * 1024 * 1024


def main(run_dir: str, launcher: int, period_s: float, port: int | None) -> None:
    """Measure the job of RUN_DIR for as long as LAUNCHER is alive."""
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(libc.PR_SET_NAME, b"fleetrun-meter")
    if os.getppid() == launcher:
        os.nice(_NICE)
        run(run_dir, period_s, port)


def run(run_dir: str, period_s: float, port: int | None) -> None:
    """Measure the job of RUN_DIR every PERIOD_S seconds until this process is killed."""
    meter = Meter(run_dir, period_s)
    exporter = None if port is None else openmetrics.Exporter(port)
    path = os.path.join(run_dir, names.METRICS)
    written_at = 0.0
    size = 0
    for _ in ticks(period_s):
        record = meter.measure()
        if exporter is not None:
            exporter.update(meter.run, record)
        if time.monotonic() >= written_at + period_s * (2 ** (size // _LENGTHY) - 0.5):
            written_at = time.monotonic()
            with suppress(OSError):
                # A full disk may have room for the next record.
                size = metricsfile.append(path, record)


class Meter:
    """Measures the job of RUN_DIR every PERIOD_S seconds."""

    def __init__(self, run_dir: str, period_s: float) -> None:
        self._period_s = period_s
        self._host = socket.gethostname()
        self._reader = runs.RunReader()
        self.run = self._reader.read(run_dir)
        self._gpus: GpuMeter | None = None
        self._before: dict[int, tuple[float, float]] = {}
        # Discard the first value, which has nothing to compare with.
        system()

    def measure(self) -> MetricsRecord:
        """Return a record of the job, its GPUs and the host now."""
        self.run = self._reader.read(self.run.path)
        logs = {
            log.pid: log for log in self.run.logs if log.ended_at is None and log.pid is not None
        }
        used = usage.of(logs)
        now = time.monotonic()
        self._before = {pid: before for pid, before in self._before.items() if pid in used}
        ranks = tuple(self._rank(log, used[pid], now) for pid, log in logs.items() if pid in used)
        return MetricsRecord(
            time=round(time.time(), 3),
            monotonic=round(now, 3),
            host=self._host,
            attempt=self.run.attempt,
            system=system(),
            ranks=ranks,
            gpus=self._gpu_uses(),
        )

    def _rank(self, log: runs.LogRecord, used: usage.Usage, now: float) -> RankUse:
        pid = log.pid or 0
        before, self._before[pid] = self._before.get(pid), (now, used.cpu_s)
        percent = usage.percent(before, self._before[pid])
        written, fetched = proc.io(pid) or (None, None)
        reported = self.run.progress(log)
        return RankUse(
            process=log.process,
            rank=log.rank,
            pid=pid,
            state=used.state,
            cpu_s=round(used.cpu_s, 2),
            cpu_percent=None if percent is None else round(percent, 1),
            memory_bytes=used.resident_bytes,
            threads=used.threads,
            processes=used.processes,
            read_bytes=fetched,
            written_bytes=written,
            step=reported.step,
            loss=reported.loss,
            step_at=None if reported.step_at is None else round(reported.step_at, 3),
        )

    def _gpu_uses(self) -> tuple[GpuUsage, ...]:
        ranks_of: dict[str, list[int]] = {}
        for process in self.run.plan.processes if self.run.plan is not None else ():
            for device in process.devices:
                ranks_of.setdefault(device, []).append(-1 if process.rank is None else process.rank)
        if not any(device.startswith("gpu:") for device in ranks_of):
            return ()
        if self._gpus is None:
            self._gpus = GpuMeter(self._period_s)
        uses = []
        for gpu in self._gpus.newest():
            ranks = ranks_of.get(f"gpu:{gpu.number}", ranks_of.get(f"gpu:{gpu.uuid}"))
            if ranks is not None:
                uses.append(gpu._replace(ranks=tuple(rank for rank in ranks if rank >= 0)))
        return tuple(uses)


def system() -> System:
    """Return the load of the whole host; unknown values are None."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_io_counters()
    network = psutil.net_io_counters()
    return System(
        # Since the last call; the first time, since the boot.
        cpu_percent=psutil.cpu_percent(),
        load=os.getloadavg()[0],
        memory_used_bytes=memory.total - memory.available,
        memory_total_bytes=memory.total,
        disk_read_bytes=None if disk is None else disk.read_bytes,
        disk_written_bytes=None if disk is None else disk.write_bytes,
        network_received_bytes=None if network is None else network.bytes_recv,
        network_sent_bytes=None if network is None else network.bytes_sent,
    )
