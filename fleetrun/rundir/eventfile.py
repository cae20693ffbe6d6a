"""`events.jsonl`: what happened, as docs/reference.md has it.

Each line is written at once, so the file is valid even if the launcher is killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from fleetrun.model import FieldVerdict
from fleetrun.rundir import reading, secrets
from fleetrun.rundir.folder import append_whole

Value: TypeAlias = str | int | float | Sequence["Value"] | Mapping[str, "Value"] | None

SCHEMA = 2


class EventRecord(NamedTuple):
    """One line; `more` has the fields of only this kind of event."""

    event: str = ""
    # Wall clock and monotonic time, in seconds.
    time: float = 0.0
    monotonic: float = 0.0
    # For a line about a process: its name, its rank, and the attempt, counted from 0.
    process: str = ""
    rank: int | None = None
    attempt: int = 0
    more: Mapping[str, Any] = {}


_COMMON = frozenset(("schema", *EventRecord._fields))


def append(
    fd: int, event: str, at: float, more: Mapping[str, Value], redact: Callable[[str], str] = str
) -> None:
    """Append the line of EVENT, at the monotonic time AT, to the file FD."""
    wall = time.time() - (time.monotonic() - at)
    times = {"time": round(wall, 6), "monotonic": round(at, 6)}
    record = {"schema": SCHEMA, **times, "event": event, **more}
    append_whole(fd, json.dumps(secrets.everywhere(record, redact)).encode() + b"\n")


def read(path: str) -> Iterator[EventRecord]:
    """Yield the readable lines of the file PATH, in order."""
    for entry in reading.lines(path):
        if entry.get("schema") == SCHEMA:
            more = {key: value for key, value in entry.items() if key not in _COMMON}
            yield reading.record(EventRecord, entry, more=more)


def verdicts(events: Iterable[EventRecord]) -> tuple[FieldVerdict, ...]:
    """Return the verdicts in the last line `strategy_report` of EVENTS; none without one."""
    reports = [event for event in events if event.event == "strategy_report"]
    entries = (reports[-1].more.get("verdicts") or ()) if reports else ()
    return tuple(reading.record(FieldVerdict, entry) for entry in entries)
