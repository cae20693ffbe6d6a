"""Serves the latest measurement as OpenMetrics, for Prometheus, at `--metrics_port`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fleetrun.rundir.metricsfile import MetricsRecord
from fleetrun.rundir.runs import Run

GAUGE, COUNTER = "gauge", "counter"


class _Row(NamedTuple):
    """A metric: its name, in bytes and seconds as Prometheus wants them, and a record's field."""

    name: str
    help: str
    field: str
    kind: str = GAUGE


_JOB = (_Row("attempt", "The attempt, from 0.", "attempt"),)
_HOST = (
    _Row("cpu_ratio", "Processors in use.", "cpu_percent"),
    _Row("load", "Load average over one minute.", "load"),
    _Row("memory_used_bytes", "Used memory of the host.", "memory_used_bytes"),
    _Row("memory_bytes", "Total memory of the host.", "memory_total_bytes"),
    _Row("disk_read_bytes", "Read from the host's disks.", "disk_read_bytes", COUNTER),
    _Row("disk_written_bytes", "Written to the host's disks.", "disk_written_bytes", COUNTER),
    _Row("network_received_bytes", "Received by the host.", "network_received_bytes", COUNTER),
    _Row("network_sent_bytes", "Sent by the host.", "network_sent_bytes", COUNTER),
)
_RANK = (
    _Row("memory_bytes", "Resident memory of a rank and its child processes.", "memory_bytes"),
    _Row("threads", "Threads of a rank and its child processes.", "threads"),
    _Row("processes", "Processes of a rank.", "processes"),
    _Row("step", "The last step of a rank.", "step"),
    _Row("loss", "The last loss that a rank printed.", "loss"),
    _Row("cpu_seconds", "Processor time of a rank and its child processes.", "cpu_s", COUNTER),
    _Row("read_bytes", "Bytes that a rank has read from disks.", "read_bytes", COUNTER),
    _Row("written_bytes", "Bytes that a rank has written to disks.", "written_bytes", COUNTER),
)
_GPU = (
    _Row("use_ratio", "Utilisation of a GPU.", "use_percent"),
    _Row("memory_used_bytes", "Used memory of a GPU.", "memory_used_bytes"),
    _Row("memory_bytes", "Total memory of a GPU.", "memory_total_bytes"),
    _Row("power_watts", "Power draw of a GPU.", "power_w"),
    _Row("temperature_celsius", "Temperature of a GPU.", "temperature_c"),
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

    families_of: dict[str, Any] = {
        GAUGE: core.GaugeMetricFamily,
        COUNTER: core.CounterMetricFamily,
    }
    info: Any = core.InfoMetricFamily("fleetrun_job", "The job.", labels=["job", "host"])
    base = [run.job_id, record.host]
    info.add_metric(base, {"run": run.name})
    yield info
    uses = [((use.process, "" if use.rank is None else str(use.rank)), use) for use in record.ranks]
    gpus = [
        ((str(gpu.number), gpu.uuid, gpu.name, ",".join(map(str, gpu.ranks))), gpu)
        for gpu in record.gpus
    ]
    tables: tuple[tuple[str, Any, tuple[str, ...], Any], ...] = (
        ("", _JOB, (), [((), record)]),
        ("host_", _HOST, (), [((), record.system)]),
        ("rank_", _RANK, ("process", "rank"), uses),
        ("gpu_", _GPU, ("gpu", "uuid", "name", "ranks"), gpus),
    )
    for of, rows, labels, entries in tables:
        for row in rows:
            name = f"fleetrun_{of}{row.name}"
            family = families_of[row.kind](name, row.help, labels=["job", "host", *labels])
            for values, entry in entries:
                value = getattr(entry, row.field)
                if value is not None:
                    is_ratio = row.name.endswith("_ratio")
                    family.add_metric([*base, *values], value / 100 if is_ratio else value)
            yield family
