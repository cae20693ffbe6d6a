"""Serves the latest measurement as OpenMetrics, for Prometheus, at `--metrics_port`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleetrun.rundir.metricsfile import MetricsRecord
from fleetrun.rundir.runs import Run

_Rows = tuple[tuple[str, str, str], ...]
# Name, help, and field of a record; bytes and seconds as Prometheus wants them.
_RANK_GAUGES: _Rows = (
    ("memory_bytes", "Resident memory of a rank and its child processes.", "memory_bytes"),
    ("threads", "Threads of a rank and its child processes.", "threads"),
    ("processes", "Processes of a rank.", "processes"),
    ("step", "The last step of a rank.", "step"),
    ("loss", "The last loss that a rank printed.", "loss"),
)
_RANK_COUNTERS: _Rows = (
    ("cpu_seconds", "Processor time of a rank and its child processes.", "cpu_s"),
    ("read_bytes", "Bytes that a rank has read from disks.", "read_bytes"),
    ("written_bytes", "Bytes that a rank has written to disks.", "written_bytes"),
)
_GPU_GAUGES: _Rows = (
    ("memory_used_bytes", "Used memory of a GPU.", "memory_used_bytes"),
    ("memory_bytes", "Total memory of a GPU.", "memory_total_bytes"),
    ("power_watts", "Power draw of a GPU.", "power_w"),
    ("temperature_celsius", "Temperature of a GPU.", "temperature_c"),
)
_SYSTEM_GAUGES: _Rows = (
    ("load", "Load average over one minute.", "load"),
    ("memory_used_bytes", "Used memory of the host.", "memory_used_bytes"),
    ("memory_bytes", "Total memory of the host.", "memory_total_bytes"),
)
_SYSTEM_COUNTERS: _Rows = (
    ("disk_read_bytes", "Read from the host's disks.", "disk_read_bytes"),
    ("disk_written_bytes", "Written to the host's disks.", "disk_written_bytes"),
    ("network_received_bytes", "Received by the host.", "network_received_bytes"),
    ("network_sent_bytes", "Sent by the host.", "network_sent_bytes"),
)


class Exporter:
    """Serves the record of the last `update` at PORT, in threads; OSError if that is in use."""

    def __init__(self, port: int) -> None:
        # An optional dependency, hence Any; without it, nothing gets here.
        from prometheus_client import CollectorRegistry, start_http_server

        self._newest: tuple[Run, MetricsRecord] | None = None
        registry: Any = CollectorRegistry()
        registry.register(self)
        start_http_server(port, registry=registry)

    def update(self, run: Run, record: MetricsRecord) -> None:
        """Serve RECORD of RUN from now on."""
        self._newest = run, record

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics, as prometheus_client asks for them."""
        if self._newest is not None:
            yield from families(*self._newest)


def families(run: Run, record: MetricsRecord) -> Iterator[Any]:
    """Yield RECORD of RUN as prometheus_client's metric families."""
    from prometheus_client import core

    gauge: Any = core.GaugeMetricFamily
    counter: Any = core.CounterMetricFamily
    info: Any = core.InfoMetricFamily("fleetrun_job", "The job.", labels=["job", "host"])
    info.add_metric([run.job_id, record.host], {"run": run.name})
    yield info
    base = [run.job_id, record.host]
    attempt = gauge("fleetrun_attempt", "The attempt, from 0.", labels=["job", "host"])
    attempt.add_metric(base, record.attempt)
    yield attempt
    for kind, rows in ((gauge, _SYSTEM_GAUGES), (counter, _SYSTEM_COUNTERS)):
        for name, about, field in rows:
            family = kind(f"fleetrun_host_{name}", about, labels=["job", "host"])
            _add(family, base, getattr(record.system, field))
            yield family
    ratio = gauge("fleetrun_host_cpu_ratio", "Processors in use.", labels=["job", "host"])
    _add(ratio, base, _ratio(record.system.cpu_percent))
    yield ratio
    labels = ["job", "host", "process", "rank"]
    for kind, rows in ((gauge, _RANK_GAUGES), (counter, _RANK_COUNTERS)):
        for name, about, field in rows:
            family = kind(f"fleetrun_rank_{name}", about, labels=labels)
            for use in record.ranks:
                rank = "" if use.rank is None else str(use.rank)
                _add(family, [*base, use.process, rank], getattr(use, field))
            yield family
    labels = ["job", "host", "gpu", "uuid", "name", "ranks"]
    use = gauge("fleetrun_gpu_use_ratio", "Utilisation of a GPU.", labels=labels)
    gauges = [
        (gauge(f"fleetrun_gpu_{n}", about, labels=labels), field) for n, about, field in _GPU_GAUGES
    ]
    for gpu in record.gpus:
        ranks = ",".join(map(str, gpu.ranks))
        values = [*base, str(gpu.number), gpu.uuid, gpu.name, ranks]
        _add(use, values, _ratio(gpu.use_percent))
        for family, field in gauges:
            _add(family, values, getattr(gpu, field))
    yield use
    for family, _ in gauges:
        yield family


def _add(family: Any, labels: list[str], value: float | None) -> None:  # noqa: ANN401 - see Exporter
    """Add VALUE, if it is known."""
    if value is not None:
        family.add_metric(labels, value)


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
