"""Records spans of the requested steps and writes them as a Chrome trace (also for Perfetto)."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import border

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = 1
# Tracks: the script's thread, and from 1 on each bucket of gradients.
TRAINING = 0
# Kinds of spans: waiting for a bucket, a bucket in flight, a collective that the script or one of
# its layers calls, and waiting for the device.
WAIT, FLIGHT, COLLECTIVE, SYNC = "wait", "flight", "collective", "sync"
# How long the thread ran, and how long it waited for a processor, taken by others or withheld by a
# cgroup; and where the kernel counts both.
RUNNING, QUEUED = "running", "queued"
_SCHEDULED = "/proc/self/schedstat"
# How long the other threads of Python ran, and where the kernel counts each.
THREADS = "threads"
_THREAD_SCHEDULED = "/proc/self/task/{}/schedstat"
NS_PER_US, _NS_PER_S = 1e3, 1e9

now = time.monotonic_ns
_watching = border.watching("the profile")


class Span(NamedTuple):
    """A span from `begin` to `end`, in nanoseconds of the steady clock."""

    name: str
    track: int
    begin: int
    end: int
    details: dict[str, Any]
    # WAIT, FLIGHT, COLLECTIVE, SYNC, or the name.
    kind: str


class _ThreadTimes(NamedTuple):
    """How the threads of Python have used processors so far, in nanoseconds."""

    running: int
    queued: int
    # By the name of each other thread.
    threads: dict[str, int]


class Recorder:
    """Keeps the spans of the steps FIRST to LAST of RANK, counted from 1, and writes them to PATH.

    A step ends when the optimizer has updated the parameters.
    """

    def __init__(self, path: str, first: int, last: int, rank: int) -> None:
        self._path = path
        self._first, self._last = first, last
        self._rank = rank
        self._pid = os.getpid()
        # The step under way.
        self._step = 1
        self.is_on = first <= 1
        self.spans: list[Span] = []
        # Begins and ends of the steps that were recorded.
        self._steps: list[tuple[int, int]] = []
        self._began = now()
        self._use = _use()
        self._thread = threading.get_ident()
        self._opened: dict[str, int] = {}
        # The running programs, and whether a step has ended in one of them.
        self._programs = 0
        self._has_ended = False
        # Whether a reducer of Paddle's averages gradients, which only it sees; and whether it does
        # in the next backward.
        self.has_reducer = self.reduces = False
        # Nanoseconds in recorded waits; and in Python's code within backwards, without computing.
        self.waited_ns = self.blocked_ns = 0
        # Returns what the rank computes on: cpu, gpu, ...; empty: not known.
        self.device: Callable[[], str] = str
        # The bucket of collectives that begin now: its name and track.
        self.label: tuple[str, int] | None = None
        # Wall clock, so that traces of several ranks can be overlaid.
        self._epoch_ns = time.time_ns() - now()

    @_watching
    def add(
        self,
        name: str,
        track: int,
        begin: int,
        *,
        details: dict[str, Any] | None = None,
        kind: str = "",
    ) -> None:
        """Record a span from BEGIN until now if its step is requested."""
        if self.is_on:
            if not self.spans and self._step == 1:
                # The process has been busy with other things before.
                self._use = _use()
            span = Span(name, track, begin, now(), details or {}, kind or name)
            self.spans.append(span)
            if span.kind in (WAIT, COLLECTIVE, SYNC):
                self.waited_ns += span.end - begin

    @_watching
    def add_collective(self, name: str, begin: int) -> None:
        """Record the collective NAME since BEGIN if the training waited for it."""
        if self.is_on and threading.get_ident() == self._thread:
            self.add(name, TRAINING, begin, kind=COLLECTIVE)

    @_watching
    def open(self, name: str) -> None:
        """Begin the span NAME of the training."""
        self._opened[name] = now()

    @_watching
    def close(self, name: str) -> None:
        """End the span NAME, if it has begun."""
        begin = self._opened.pop(name, None)
        if begin is not None:
            self.add(name, TRAINING, begin)

    @_watching
    def begin_program(self) -> None:
        """Record that a static program runs, in which a step may end."""
        self._programs += 1

    @_watching
    def end_program(self, begin: int) -> None:
        """Record the run of a program since BEGIN, as a part of the step that has ended in it."""
        self._programs -= 1
        self.add("run", TRAINING, begin)
        if self._has_ended and not self._programs:
            self._has_ended = False
            self.end_step()

    @_watching
    def end_step(self) -> None:
        """Record that a step has ended; after the last requested one, write the trace."""
        if self._programs:
            self._has_ended = True
            return
        at = now()
        if self.is_on:
            # Exclude what the process did before its first step.
            begin = self._began if self._steps or self._step > 1 else self._earliest(at)
            self._steps.append((begin, at))
        self._step += 1
        self._began = at
        was_on, self.is_on = self.is_on, self._first <= self._step <= self._last
        if self.is_on and not was_on:
            self._use = _use()
        if was_on and not self.is_on:
            self.write()

    def _earliest(self, at: int) -> int:
        """Return when the first step began; making a model may communicate, too."""
        begins = (span.begin for span in self.spans if span.kind != COLLECTIVE)
        return min(begins, default=at)

    @_watching
    def write(self) -> None:
        """Write the trace once; a failure is printed, and the training goes on."""
        if os.getpid() != self._pid or not self._path or not self._steps:
            return
        path, self._path, self.is_on = self._path, "", False
        try:
            draft = f"{path}.{os.getpid()}"
            # Private from the first byte, and never through a link.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump(self.document(), file)
            os.replace(draft, path)
        except OSError as error:
            print(f"fleetrun: the profile cannot be written: {error}", file=sys.stderr)
        self.spans = []

    def document(self) -> dict[str, Any]:
        """Return the trace: events in microseconds, and a summary of the steps."""
        begin, end = self._steps[0][0], self._steps[-1][1]
        spans = [span for span in self.spans if begin <= span.begin and span.end <= end]
        names = {span.track: span.name for span in spans if span.track}
        names[TRAINING] = "training"
        means = summary(self._steps, spans)
        use = _used(self._use, _use())
        for kind, used_ns in (
            (RUNNING, use.running),
            (QUEUED, use.queued),
            (THREADS, sum(use.threads.values())),
        ):
            means["seconds"][kind] = used_ns / _NS_PER_S / len(self._steps)
        # The thread that ran longest; empty: there is only one thread.
        means["thread"] = max(use.threads, key=use.threads.__getitem__, default="")
        means["reducer"] = self.has_reducer
        means["device"] = self.device()
        events = [
            _named("process_name", self._rank, 0, f"rank {self._rank}"),
            *(_named("thread_name", self._rank, *track) for track in sorted(names.items())),
            *map(self._event, [*self._step_spans(), *spans]),
        ]
        return {
            "schema": SCHEMA,
            "displayTimeUnit": "ms",
            "traceEvents": events,
            "otherData": {"rank": self._rank, "first_step": self._first, "summary": means},
        }

    def _step_spans(self) -> list[Span]:
        return [
            Span(f"step {self._first + place}", TRAINING, begin, end, {}, "step")
            for place, (begin, end) in enumerate(self._steps)
        ]

    def _event(self, span: Span) -> dict[str, Any]:
        return {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "ts": round((span.begin + self._epoch_ns) / NS_PER_US, 3),
            "dur": round((span.end - span.begin) / NS_PER_US, 3),
            "pid": self._rank,
            "tid": span.track,
            "args": span.details,
        }


def _use() -> _ThreadTimes:
    """Return the use of processors so far; zeros where it is not known."""
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    threads = {
        thread.name: _scheduled(_THREAD_SCHEDULED.format(thread.native_id))[0] for thread in others
    }
    return _ThreadTimes(*_scheduled(_SCHEDULED), threads)


def _used(before: _ThreadTimes, after: _ThreadTimes) -> _ThreadTimes:
    """Return the use of processors between BEFORE and AFTER."""
    threads = {name: ns - before.threads.get(name, 0) for name, ns in after.threads.items()}
    return _ThreadTimes(after.running - before.running, after.queued - before.queued, threads)


def _scheduled(path: str) -> tuple[int, int]:
    """Return how long the thread of the file PATH ran and waited for a processor, in ns."""
    try:
        with open(path, encoding="ascii") as file:
            running, queued = file.read().split()[:2]
            return int(running), int(queued)
    except (OSError, ValueError):
        return 0, 0


def _named(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}


def summary(steps: list[tuple[int, int]], spans: list[Span]) -> dict[str, Any]:
    """Return the mean seconds of each kind of span in a step, and the hidden share.

    `hidden` is the share of the collectives' time in which the training waited for none of them,
    null without collectives. Waiting counts as `wait` or `collective`, not as part of what is
    around it.

    >>> steps = [(0, 1000)]
    >>> spans = [
    ...     Span("backward", 0, 100, 600, {}, "backward"),
    ...     Span("bucket 0", 1, 300, 500, {}, FLIGHT),
    ...     Span("send bucket 0", 0, 440, 500, {}, "send"),
    ...     Span("wait for bucket 0", 0, 450, 500, {}, WAIT),
    ... ]
    >>> result = summary(steps, spans)
    >>> result["hidden"], result["steps"]
    (0.75, 1)
    >>> {kind: round(seconds * 1e9) for kind, seconds in result["seconds"].items()}
    {'backward': 450, 'flight': 200, 'send': 10, 'step': 1000, 'wait': 50}
    """
    totals: dict[str, int] = {}
    for span in spans:
        totals[span.kind] = totals.get(span.kind, 0) + span.end - span.begin
    waits = _union([(span.begin, span.end) for span in spans if span.kind == WAIT])
    # A bucket may be waited for in a collective, and over gloo while it is sent.
    within: list[tuple[int, int]] = []
    for kinds in (
        (WAIT,),
        (COLLECTIVE,),
        (SYNC,),
        ("data", "forward", "backward", "send", "update"),
    ):
        for kind in kinds:
            inside = [(span.begin, span.end) for span in spans if span.kind == kind]
            if kind in totals:
                totals[kind] -= _overlap(_union(inside), _union(within))
        within += [(span.begin, span.end) for span in spans if span.kind in kinds]
    flights = [(span.begin, span.end) for span in spans if span.kind == FLIGHT]
    flown = sum(end - begin for begin, end in flights)
    exposed = sum(_overlap([flight], waits) for flight in flights)
    count = len(steps)
    totals["step"] = sum(end - begin for begin, end in steps)
    return {
        "steps": count,
        "seconds": {kind: total / count / _NS_PER_S for kind, total in sorted(totals.items())},
        "hidden": (flown - exposed) / flown if flown else None,
    }


def _union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _overlap(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    """Return the total time in both lists of intervals, each disjoint and sorted."""
    total = place = 0
    for begin, end in first:
        while place < len(second) and second[place][1] <= begin:
            place += 1
        at = place
        while at < len(second) and second[at][0] < end:
            total += min(end, second[at][1]) - max(begin, second[at][0])
            at += 1
    return total
