"""Measures a job every few seconds, in a process of its own, and writes metrics.jsonl."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from fleetrun.probe import addresses, delays, usage
from fleetrun.probe.gpumeter import GpuMeter
from fleetrun.probe.ticks import ticks
from fleetrun.records import (
    flightfile,
    metricsfile,
    names,
    progress,
    reading,
    runs,
    scalarfile,
)
from fleetrun.records.metricsfile import GpuUsage, LinkUse, MetricsRecord, RankUse, System
from fleetrun.run import libc, proc
from fleetrun.sources import sockets

if TYPE_CHECKING:
    from collections.abc import Mapping

_NICE = 10
# Each time the file grows by this much, records become half as frequent.
_LENGTHY = 64 * 1024 * 1024
# How often to look for new scalar files.
_SCALARS_S = 60.0


def main(run_dir: str, launcher: int, period_s: float, listening_fd: int | None) -> None:
    """Measure the job of RUN_DIR for as long as LAUNCHER is alive."""
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(libc.PR_SET_NAME, b"fleetrun-meter")
    if os.getppid() == launcher:
        os.nice(_NICE)
        run(run_dir, period_s, listening_fd)


def run(run_dir: str, period_s: float, listening_fd: int | None) -> None:
    """Measure the job of RUN_DIR every PERIOD_S seconds until this process is killed."""
    meter = Meter(run_dir, period_s)
    exporter = None
    if listening_fd is not None:
        from fleetrun.sinks.metrics import openmetrics  # only with --metrics_port

        exporter = openmetrics.Exporter(listening_fd)
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
        self._scalars: set[str] = set()
        self._began = time.monotonic()
        self._scalars_at = 0.0
        # By inode, the bytes that connections to other hosts had moved at the last measurement.
        self._moved: dict[int, int] = {}
        # The hosts of the job, and by address what the plan calls them.
        self._nodes: tuple[str, ...] = ()
        self._names: dict[str, str] = {}
        self._collectives: dict[int, CollectiveClock] = {}
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
        stolen = delays.stolen()
        ranks = tuple(
            self._rank(log, used[pid], now, delays.of(pid, stolen))
            for pid, log in logs.items()
            if pid in used
        )
        return MetricsRecord(
            time=round(time.time(), 3),
            monotonic=round(now, 3),
            host=self._host,
            attempt=self.run.attempt,
            system=system(),
            ranks=ranks,
            gpus=self._gpu_uses(used),
            links=self._links(used),
            scalars=self._found_scalars(used, now),
        )

    def _rank(
        self, log: runs.LogRecord, used: usage.Usage, now: float, delayed: delays.Delays
    ) -> RankUse:
        pid = log.pid or 0
        before, self._before[pid] = self._before.get(pid), (now, used.cpu_s)
        percent = usage.percent(before, self._before[pid])
        moved = proc.io(pid)
        reported = progress.read(self.run.path, log)
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
            read_bytes=None if moved is None else moved.fetched,
            written_bytes=None if moved is None else moved.written,
            step=reported.step,
            loss=reported.loss,
            main_s=_rounded(delayed.main_s),
            queued_s=_rounded(delayed.queued_s),
            throttled_s=_rounded(delayed.throttled_s),
            stolen_s=_rounded(delayed.stolen_s),
            collectives_s=_rounded(self._collectives_s(log)),
            processors=delayed.processors,
            process_s=round(used.leader_s, 2),
            major_faults=delayed.major_faults,
        )

    def _collectives_s(self, log: runs.LogRecord) -> float | None:
        """Return how long the rank of LOG has been in collectives; None if none is recorded."""
        pid = log.pid or 0
        path = os.path.join(self.run.path, names.collectives(log.file_key))
        if reading.size(path) < 0:
            return None
        record = flightfile.parse(reading.content(path, flightfile.MOST_BYTES))
        if record is None or record.pid != pid:
            return None
        return self._collectives.setdefault(pid, CollectiveClock()).look(record, time.time())

    def _links(self, used: Mapping[int, usage.Usage]) -> tuple[LinkUse, ...]:
        """Return the connections of the ranks USED to other hosts of the job."""
        if self.run.plan is None or len(self.run.plan.nodes) < 2:
            return ()
        try:
            links = sockets.links()
        except OSError:
            return ()
        if self._nodes != self.run.plan.nodes:
            self._nodes = self.run.plan.nodes
            self._names = {ip: node for node in self._nodes for ip in addresses.resolve(node)}
        own = {inode: links[inode] for inode in sockets.inodes(_pids(used)) & links.keys()}
        moved = {inode: link.acked + link.received for inode, link in own.items()}
        active = {inode for inode in moved if moved[inode] != self._moved.get(inode, 0)}
        self._moved = moved
        by_peer: dict[str, list[int]] = {}
        for inode, link in own.items():
            by_peer.setdefault(self._names.get(link.peer, link.peer), []).append(inode)
        return tuple(
            LinkUse(
                peer=peer,
                rtt_s=min((own[inode].rtt_s for inode in inodes if inode in active), default=None),
                acked_bytes=sum(own[inode].acked for inode in inodes),
                busy_s=round(sum(own[inode].busy_s for inode in inodes), 3),
                segments=sum(own[inode].segments for inode in inodes),
                resent=sum(own[inode].resent for inode in inodes),
            )
            for peer, inodes in sorted(by_peer.items())
        )

    def _gpu_uses(self, used: Mapping[int, usage.Usage]) -> tuple[GpuUsage, ...]:
        """Return the state of the job's GPUs."""
        ranks_of: dict[str, list[int]] = {}
        for process in self.run.plan.processes if self.run.plan is not None else ():
            for device in process.devices:
                ranks_of.setdefault(device, []).append(-1 if process.rank is None else process.rank)
        if not any(device.startswith("gpu:") for device in ranks_of):
            return ()
        if self._gpus is None:
            self._gpus = GpuMeter(self._period_s)
        uses = []
        own = _pids(used)
        for gpu in self._gpus.newest():
            ranks = ranks_of.get(f"gpu:{gpu.number}", ranks_of.get(f"gpu:{gpu.uuid}"))
            if ranks is not None:
                # In a container the driver may report pids of another namespace.
                strangers = set(gpu.pids) - own if own & set(gpu.pids) else ()
                uses.append(
                    gpu._replace(
                        ranks=tuple(rank for rank in ranks if rank >= 0),
                        strangers=tuple(sorted(strangers)),
                    )
                )
        return tuple(uses)

    def _found_scalars(self, used: Mapping[int, object], now: float) -> tuple[str, ...]:
        """Return the folders of scalar files that ranks have or had open."""
        if now >= self._scalars_at:
            # A short job opens them early or not at all.
            self._scalars_at = now + min(_SCALARS_S, now - self._began)
            for pid in used:
                self._scalars |= scalars_of(pid)
        return tuple(sorted(self._scalars))


class CollectiveClock:
    """Sums the seconds of a rank in the collectives for which its main thread waits."""

    def __init__(self) -> None:
        self._until = 0.0
        self._total_s = 0.0

    def look(self, record: flightfile.FlightRecord, at: float) -> float | None:
        """Return the seconds up to AT (wall clock); None if its main thread waits for none.

        >>> from fleetrun.records.flightfile import Collective, CollectiveChannel, FlightRecord
        >>> channel = CollectiveChannel((0, 1))
        >>> calls = (Collective(channel, 1, "all_reduce", 1.0, 1.5),)
        >>> CollectiveClock().look(FlightRecord(0, 7, 0, calls), 3.0)
        0.5
        """
        calls = [call for call in record.collectives if call.state == flightfile.BLOCKING]
        if not calls:
            return None
        # The ring may have dropped some since the last look: assume that they took as long.
        begin = max(self._until, calls[0].issued_at)
        waited = sum(
            max(0.0, min(at, call.done_at or at) - max(begin, call.issued_at)) for call in calls
        )
        if self._until and begin > self._until and at > begin:
            waited *= (at - self._until) / (at - begin)
        self._total_s += waited
        self._until = at
        return self._total_s


def _pids(used: Mapping[int, usage.Usage]) -> set[int]:
    return {pid for use in used.values() for pid in use.pids}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def system() -> System:
    """Return the load of the whole host; unknown values are None."""
    import psutil  # this process only

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


def scalars_of(pid: int) -> set[str]:
    """Return the folders in which PID writes scalars for TensorBoard or VisualDL."""
    return {
        os.path.dirname(path) for _, path in proc.open_files(pid) if scalarfile.FILES.search(path)
    }
