"""`trace.RANK.json`: where the time of a few steps went; a Chrome trace with a summary; schema 1.

`traceEvents` are Chrome's, in microseconds since 1970; the argument `busy` of a backward says how
long its rank worked in it, if a reducer of Paddle's waits for others in it, too.

`otherData` has `rank`, `first_step` and `summary`: `steps` (how many were recorded), `seconds` (of
each kind of span in a step, on average), `hidden` (the share of the time of collectives that nobody
waited for; null: there were none), `thread` (the name of the other thread of Python that ran
longest; empty: none), `reducer` (whether one of Paddle's averages gradients in the backward) and
`device` (cpu, gpu, ...; empty: not known).
"""

from __future__ import annotations

from typing import NamedTuple

from fleetrun.records import reading

SCHEMA = 1
_US_PER_S = 1e6


class SpanRecord(NamedTuple):
    """Something that a rank did on a track, in seconds since 1970."""

    name: str
    kind: str
    track: str
    begin: float
    seconds: float
    # Of a backward in which a reducer of Paddle's communicates: how long the rank computed in it,
    # or waited in Python's code for no other rank; else None.
    busy: float | None = None


class TraceRecord(NamedTuple):
    """The steps that RANK has recorded."""

    rank: int
    first_step: int
    steps: int
    seconds: dict[str, float]
    hidden: float | None
    spans: tuple[SpanRecord, ...]
    thread: str = ""
    has_reducer: bool = True
    device: str = ""
    # The place of its host among those of the job; times compare within a host.
    host: int = 0

    def reported(self) -> str:
        """Return in one line where the time went.

        >>> print(TraceRecord(0, 3, 5, {"step": 0.09, "wait": 0.0304}, 0.354, ()).reported())
        rank 0, steps 3-7: 90 ms a step: wait 30 ms; 35 % of communication hidden
        """
        shown = [
            f"{kind} {self.seconds[kind] * 1e3:.0f}"
            for kind in (
                "data",
                "forward",
                "run",
                "backward",
                "wait",
                "collective",
                "sync",
                "update",
            )
            if kind in self.seconds
        ]
        last = self.first_step + self.steps - 1
        steps = f"step {last}" if self.steps == 1 else f"steps {self.first_step}-{last}"
        hidden = "" if self.hidden is None else f"; {self.hidden:.0%} of communication hidden"
        return (
            f"rank {self.rank}, {steps}: {self.seconds.get('step', 0.0) * 1e3:.0f} ms a step: "
            f"{', '.join(shown)} ms{hidden.replace('%', ' %')}"
        )


def read(path: str) -> TraceRecord | None:
    """Return what the file PATH has; None where there is none."""
    document = reading.document(path)
    if document is None or document.get("schema") != SCHEMA:
        return None
    other_data = reading.mapping(document.get("otherData"))
    summary = reading.mapping(other_data.get("summary"))
    rank, first = reading.whole(other_data.get("rank")), reading.whole(other_data.get("first_step"))
    steps = reading.whole(summary.get("steps"))
    if rank is None or first is None or not steps:
        return None
    events = reading.mappings(document.get("traceEvents"))
    tracks = {
        event.get("tid"): reading.text(reading.mapping(event.get("args")).get("name"))
        for event in events
        if event.get("name") == "thread_name" and isinstance(event.get("tid"), int)
    }
    spans = []
    for event in events:
        begin, length = reading.real(event.get("ts")), reading.real(event.get("dur"))
        tid = reading.whole(event.get("tid"))
        if event.get("ph") == "X" and begin is not None and length is not None and tid in tracks:
            name, kind = reading.text(event.get("name")), reading.text(event.get("cat"))
            busy = reading.real(reading.mapping(event.get("args")).get("busy"))
            busy = None if busy is None else busy / _US_PER_S
            times = begin / _US_PER_S, length / _US_PER_S, busy
            spans.append(SpanRecord(name, kind, tracks[tid], *times))
    seconds = {
        kind: value
        for kind, raw in reading.mapping(summary.get("seconds")).items()
        if (value := reading.real(raw)) is not None
    }
    hidden = reading.real(summary.get("hidden"))
    thread, has_reducer = reading.text(summary.get("thread")), summary.get("reducer") is not False
    device = reading.text(summary.get("device"))
    return TraceRecord(
        rank, first, steps, seconds, hidden, tuple(spans), thread, has_reducer, device
    )
