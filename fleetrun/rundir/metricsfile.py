"""`metrics.jsonl`: what a host, its GPUs and its ranks used, one JSON object each few seconds.

What is not known is null. What counts since the beginning (`_s`, bytes read and written) only
grows, but for another attempt or boot.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from fleetrun.rundir import reading
from fleetrun.rundir.folder import append_whole

SCHEMA = 1
# The longest line: a few hundred bytes for each of very many ranks.
_LONGEST = 4 * 1024 * 1024
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class System(NamedTuple):
    """The whole host: processors in use (of 100 %), and traffic of disks and network."""

    cpu_percent: float | None
    load: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    disk_read_bytes: int | None
    disk_written_bytes: int | None
    network_received_bytes: int | None
    network_sent_bytes: int | None


class RankUse(NamedTuple):
    """A process of the job with its children; 100 % is one processor."""

    process: str
    rank: int | None
    pid: int
    state: str
    cpu_s: float
    cpu_percent: float | None
    memory_bytes: int
    threads: int
    processes: int
    read_bytes: int | None
    written_bytes: int | None
    step: int | None
    loss: float | None
    # When a heartbeat reported the step.
    step_at: float | None = None


class GpuUsage(NamedTuple):
    """A GPU, as `fleetrun --gpus` numbers it, and the ranks of a job that use it."""

    number: int
    uuid: str
    name: str
    use_percent: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    ranks: tuple[int, ...] = ()


class MetricsRecord(NamedTuple):
    """One line."""

    time: float
    monotonic: float
    host: str
    attempt: int
    system: System
    ranks: tuple[RankUse, ...]
    gpus: tuple[GpuUsage, ...]


def append(path: str, record: MetricsRecord) -> int:
    """Append RECORD to the file PATH atomically, and return its length; OSError if that fails."""
    line = json.dumps({"schema": SCHEMA, **reading.plain(record)}).encode() + b"\n"
    with open(os.open(path, _OPEN, 0o600), "ab", buffering=0) as file:
        append_whole(file.fileno(), line)
        return os.fstat(file.fileno()).st_size


def spread(path: str, most: int) -> tuple[MetricsRecord, ...]:
    """Return at most MOST lines of the file PATH, evenly spread, and the newest one."""
    lines = reading.piece(path, 0, reading.size(path)).split(b"\n")[:-1]
    # Parsing one takes milliseconds with a thousand ranks.
    chosen = dict.fromkeys((*lines[:: len(lines) // most + 1], *lines[-1:]))
    return tuple(record for line in chosen if (record := parse(line)) is not None)


def newest(path: str) -> MetricsRecord | None:
    """Return the last line of the file PATH, if any."""
    lines = (reading.content(path, _LONGEST, from_end=True) or b"").split(b"\n")
    # After the last newline there is nothing, or half a line.
    return parse(lines[-2]) if len(lines) > 1 else None


def parse(line: bytes) -> MetricsRecord | None:
    """Return the record in LINE, if it is one."""
    document = reading.parse(line) or {}
    if document.get("schema") != SCHEMA:
        return None
    return reading.record(
        MetricsRecord,
        document,
        system=reading.record(System, document["system"]),
        ranks=tuple(reading.record(RankUse, use) for use in document["ranks"]),
        gpus=tuple(reading.record(GpuUsage, gpu) for gpu in document["gpus"]),
    )
