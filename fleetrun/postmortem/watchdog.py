"""Reads what Paddle's watchdog of NCCL's operations has logged, as records of collectives; pure.

With `FLAGS_enable_async_trace=1` Paddle logs, `PADDLE_PG_TIMEOUT` ms after the last progress, the
last operation of each group, and the operations that are not done: by its own reducer, too. Written
by Paddle's public source (`comm_task_manager.cc`, `nccl_comm_task.cc`); never run on a GPU.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from fleetrun.records.flightfile import Collective, CollectiveChannel, FlightRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

_LINE = re.compile(
    r"[IW](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.\d+ .*comm_task_manager\.cc:\d+\] .*"
    r"group_key:([^,]+),group_ranks:([\d~#]+),.*,comm_count:(\d+),op:(\w+),"
    r"started:[01],completed:([01]),.*,nranks:(\d+)",
    re.ASCII,
)
# Paddle counts these together, by group or by pair.
_MESSAGES = frozenset(("SEND", "RECV"))


def timeout_s(environ: Mapping[str, str]) -> float:
    """Return after how long without progress Paddle logs."""
    text = environ.get("PADDLE_PG_TIMEOUT", "")
    return int(text if text.isdecimal() else 1_800_000) / 1000


def lines(log: str) -> str:
    """Return the lines of LOG that are the watchdog's."""
    return "".join(f"{line}\n" for line in log.split("\n") if _LINE.match(line))


def parse(rank: int, log: str, *, timeout_s: float, now: float) -> FlightRecord | None:
    """Return what the watchdog of RANK has logged until NOW; None if it has logged nothing."""
    collectives: dict[tuple[CollectiveChannel, int], Collective] = {}
    last: dict[CollectiveChannel, int] = {}
    logged_at = 0.0
    for match in filter(None, map(_LINE.match, log.split("\n"))):
        *moment, group, members, count, operation, is_completed, size = match.groups()
        logged_at = _at(*map(int, moment), now=now)
        ranks = _ranks(members, int(size))
        if not ranks or (operation in _MESSAGES and len(ranks) > 2):
            # Each rank counts its own messages of a batch.
            continue
        if operation in _MESSAGES:
            operation = "SEND/RECV"
        # The name tells groups of the same ranks apart.
        channel = CollectiveChannel(ranks, operation=group)
        collectives[channel, int(count)] = Collective(
            channel,
            int(count),
            f"NCCL {operation}",
            issued_at=logged_at - timeout_s,
            done_at=logged_at if is_completed == "1" else None,
        )
        last[channel] = max(last.get(channel, 0), int(count))
    if not logged_at:
        return None
    in_order = sorted(collectives.values(), key=lambda collective: collective.sequence)
    return FlightRecord(rank, 0, 0, tuple(in_order), last, settled_at=logged_at)


def current(records: Mapping[int, FlightRecord]) -> dict[int, FlightRecord]:
    """Return those of RECORDS that were written after the operation began that is awaited.

    The last operations are logged once in a job, so they may be those of an earlier delay.
    """
    began = max(
        (
            call.issued_at
            for record in records.values()
            for call in record.collectives
            if call.is_open
        ),
        default=0.0,
    )
    return {rank: record for rank, record in records.items() if record.settled_at >= began}


def _at(month: int, day: int, hour: int, minute: int, second: int, *, now: float) -> float:
    """Return the time of that moment before NOW, as the lines have no year."""
    year = time.localtime(now).tm_year
    at = time.mktime((year, month, day, hour, minute, second, 0, 0, -1))
    if at < now + 86_400:
        return at
    return time.mktime((year - 1, month, day, hour, minute, second, 0, 0, -1))


def _ranks(text: str, size: int) -> tuple[int, ...]:
    """Return the SIZE ranks in TEXT, as Paddle writes them; empty if it has others.

    >>> _ranks("0~2#5", 4), _ranks("0~999999999", 4)
    ((0, 1, 2, 5), ())
    """
    ends = [[int(end or -1) for end in part.split("~")] for part in text.split("#")]
    ranges = [range(part[0], part[-1] + 1) for part in ends]
    if sum(map(len, ranges)) != size:
        return ()
    return tuple(rank for numbers in ranges for rank in numbers)
