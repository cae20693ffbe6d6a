"""Run directories of large jobs, made by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fleetrun.records import eventfile, flightfile, metricsfile

if TYPE_CHECKING:
    from pathlib import Path


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
    names = [["group", 0, [[[0, 5]], 1, 0]], ["channel", 0, [0, "", 0]], ["operation", 0, "sum"]]
    table = "".join(f"{json.dumps(name)}\n" for name in names).encode()
    counts = 8, 1, len(table), len(table), 0, 1, generation, rank, 0
    head = flightfile.HEADER.pack(flightfile.MAGIC, *counts)
    slots = [bytes(flightfile.SLOT.size)] * 8
    for number, (begin, end) in enumerate(spans, 1):
        times = (int(begin * 1e9), int(end * 1e9))
        slots[number] = flightfile.SLOT.pack(number, number, *times, 4, *(0,) * 6, -1, *(0,) * 7)
    body = head.ljust(flightfile.HEADER_BYTES, b"\0") + len(spans).to_bytes(8, "little") + table
    return body + b"".join(slots) + bytes(flightfile.PARTS_BYTES)
