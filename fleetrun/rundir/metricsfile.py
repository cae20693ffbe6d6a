"""`metrics.jsonl`: what a host, its GPUs and its ranks used, one JSON object each few seconds.

Schema 1: `time` (wall clock), `monotonic`, `host`, `attempt`, `system` (of the whole host), `ranks`
and `gpus`.
What is not known is null. What counts since the beginning (`_s`, read and written bytes) only
grows, but for another attempt or boot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from fleetrun.rundir import reading
from fleetrun.rundir.folder import Closing, append_whole

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
    """A GPU, and the ranks of a job that use it.

    None is what the driver does not report, as for the parent of a MIG instance.
    """

    # As `fleetrun --gpus` numbers it.
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
    """Append RECORD to the file PATH atomically, and return the file's length.

    Raises OSError if that fails.
    """
    document = {"schema": SCHEMA, **reading.plain(record)}
    line = json.dumps(document, allow_nan=False).encode() + b"\n"
    with Closing(fd := os.open(path, _OPEN, 0o600)):
        append_whole(fd, line)
        return os.fstat(fd).st_size


class MetricsReader:
    """Reads the file PATH, which may still grow, and keeps at most MOST lines, spread evenly."""

    def __init__(self, path: str, most: int) -> None:
        self._file = reading.GrowingFile(path)
        self._most = most
        # One of this many lines is kept, by line number.
        self._every = 1
        self._kept: dict[int, MetricsRecord] = {}
        # Lines that are not parsed yet: with a thousand ranks each takes tens of milliseconds, and
        # most lines of a file that is read for the first time are dropped again.
        self._unread: dict[int, bytes] = {}
        self._count = 0

    def read(self) -> tuple[MetricsRecord, ...]:
        """Return the lines that are kept so far, and the newest one."""
        while text := self._file.read():
            self._take(text.split(b"\n")[:-1])
        for number, line in self._unread.items():
            record = parse(line)
            if record is not None:
                self._kept[number] = record
        self._unread = {}
        return tuple(self._kept.values())

    def _take(self, lines: Sequence[bytes]) -> None:
        while (self._count + len(lines)) // self._every >= self._most:
            self._every *= 2
        self._kept = {at: record for at, record in self._kept.items() if at % self._every == 0}
        self._unread = {at: line for at, line in self._unread.items() if at % self._every == 0}
        last = self._count + len(lines) - 1
        for number, line in enumerate(lines, self._count):
            if number % self._every == 0 or number == last:
                self._unread[number] = line
        self._count += len(lines)


def newest(path: str) -> MetricsRecord | None:
    """Return the last readable line of the file PATH, if any."""
    lines = (reading.content(path, _LONGEST, from_end=True) or b"").split(b"\n")
    # After the last newline there is nothing, or half a line.
    return parse(lines[-2]) if len(lines) > 1 else None


def parse(line: bytes) -> MetricsRecord | None:
    """Return the record in LINE, if it is one."""
    document = reading.parse(line)
    if document is None or document.get("schema") != SCHEMA:
        return None
    return reading.record(MetricsRecord, document)
