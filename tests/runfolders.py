"""Metrics, and run directories of large jobs, made by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fleetrun.rundir import eventfile, flightfile, metricsfile
from fleetrun.rundir.runs import Run

if TYPE_CHECKING:
    from pathlib import Path


def a_record() -> metricsfile.MetricsRecord:
    """Return a line with a GPU and two ranks, one of which reports no step."""
    first = metricsfile.RankUse("trainer.0", 0, 11, "R", 1.5, 99.0, 1 << 30, 9, 3, 1, 2, 120, 0.5)
    second = metricsfile.RankUse(
        "trainer.1", 1, 12, "S", 1.5, None, 1 << 30, 9, 3, None, None, None, None
    )
    gpu = metricsfile.GpuUsage(0, "GPU-a", "H", 87.0, 10, 20, 412.5, 61.0, (0,))
    system = metricsfile.System(50.0, 1.5, 10, 20, 1, 2, 3, 4)
    return metricsfile.MetricsRecord(1000.5, 7.25, "h", 1, system, (first, second), (gpu,))


def a_run() -> Run:
    """Return the run of these metrics."""
    return Run("/log/runs/a", None, (), "job", 0, 2, 1000.0, None, None, "", 1)


def measured(ranks: int, moment: int, *, step: int | None = None) -> metricsfile.MetricsRecord:
    """Make what RANKS, each with a GPU, used at a moment; the last one's GPU tells nothing."""
    system = metricsfile.System(50.0, 1.0, 1, 2, 0, 0, 0, 0)
    uses = tuple(
        metricsfile.RankUse(
            *(f"trainer.{rank}", rank, 1, "R", float(moment), 90.0, 1 << 30, 1, 1, 0, 0),
            *(step, None),
        )
        for rank in range(ranks)
    )
    gpus = tuple(
        metricsfile.GpuUsage(
            *(rank, f"GPU-{rank}", "H100", None if rank == ranks - 1 else 70.0, 1 << 30),
            *(1 << 36, 300.0, 50.0, (rank,)),
        )
        for rank in range(ranks)
    )
    return metricsfile.MetricsRecord(1e9 + 5 * moment, 0.0, "h", 0, system, uses, gpus)


def big(folder: Path, ranks: int, **launched: object) -> Path:
    """Make the run directory of a job of RANKS, of which one has failed and ended the others.

    LAUNCHED are more fields of its first event.
    """
    folder.mkdir(parents=True)
    (folder / "lock").write_text("its launcher has ended")
    lines: list[dict[str, Any]] = [
        {"event": "launched", "job_id": "big", "processes": ranks, **launched}
    ]
    about = [
        {"process": f"trainer.{rank}", "rank": rank, "attempt": 0, "log": f"workerlog.{rank}"}
        for rank in range(ranks)
    ]
    lines += [{"event": "started", **process, "pid": 1} for process in about]
    lines += [
        {
            "event": "exited",
            **process,
            "code": 7 if process["rank"] == 5 else None,
            "signal": None if process["rank"] == 5 else "SIGTERM",
            "peak_bytes": 1 << 28,
        }
        for process in about
    ]
    lines += [{"event": "root_cause", **about[5], "failed": ["trainer.5"]}]
    lines += [{"event": "finished", "exit_code": 7, "verdict": "rank 5 exited with 7"}]
    for moment in range(3):
        metricsfile.append(str(folder / "metrics.jsonl"), measured(ranks, moment))
    with (folder / "events.jsonl").open("w") as file:
        for number, line in enumerate(lines):
            at = {"schema": eventfile.SCHEMA, "time": 1e9 + number / 100, "monotonic": number / 100}
            file.write(json.dumps({**at, **line}) + "\n")
    return folder


def ring(rank: int, spans: list[tuple[float, float]], generation: int = 0) -> bytes:
    """Make what a rank has recorded of all-reduces, from and until seconds; 0: not done."""
    head = flightfile.HEADER.pack(flightfile.MAGIC, 0, 1, generation, rank, 0)
    table = json.dumps(["channel", 0, [[0, 5]], 1, "", -1]).encode() + b"\n"
    slots = [bytes(flightfile.SLOT_BYTES)] * flightfile.SLOTS
    for number, (begin, end) in enumerate(spans, 1):
        call = [0, number, int(begin * 1e9), "sum", "", [], 4, -1, None]
        slot = flightfile.SLOT.pack(number, int(end * 1e9), 0) + json.dumps(call).encode()
        slots[number] = slot.ljust(flightfile.SLOT_BYTES, b"\0")
    heads = flightfile.HEADS.pack(len(spans), *[0] * 511)
    head = head.ljust(flightfile.HEADER_BYTES, b"\0")
    return head + heads + table.ljust(flightfile.TABLE_BYTES, b"\0") + b"".join(slots)
