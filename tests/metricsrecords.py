"""Metrics made by hand."""

from __future__ import annotations

from fleetrun.rundir.metricsfile import GpuUsage, MetricsRecord, RankUse, System
from fleetrun.rundir.runs import Run


def a_record() -> MetricsRecord:
    """Return a line with a GPU and two ranks, one of which reports no step."""
    first = RankUse("trainer.0", 0, 11, "R", 1.5, 99.0, 1 << 30, 9, 3, 1, 2, 120, 0.5)
    second = RankUse("trainer.1", 1, 12, "S", 1.5, None, 1 << 30, 9, 3, None, None, None, None)
    gpu = GpuUsage(0, "GPU-a", "H", 87.0, 10, 20, 412.5, 61.0, (0,))
    system = System(50.0, 1.5, 10, 20, 1, 2, 3, 4)
    return MetricsRecord(1000.5, 7.25, "h", 1, system, (first, second), (gpu,))


def a_run() -> Run:
    """Return the run of these metrics."""
    return Run("/log/runs/a", None, (), "job", 0, 1, 2, 1000.0, None, None, "", 1)
