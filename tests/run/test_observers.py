"""Sinks and sources: which events they get, and what a failure of each means."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import plans
import pytest

from fleetrun.run.events import Declared, Happening, SourceFailed, TimerExpired
from fleetrun.run.loop import Loop
from fleetrun.run.observers import ObservedJob, Observers, Sink, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fleetrun.run.loop import Waiting

NEWS = TimerExpired(1.0)


class _Ear(Sink):
    """Gets all events."""

    def __init__(self) -> None:
        self.heard: list[Happening] = []

    def on_event(self, happening: Happening) -> None:
        self.heard.append(happening)


class _Deaf(_Ear):
    """Fails when it gets an event."""

    def on_event(self, happening: Happening) -> None:
        super().on_event(happening)
        raise OSError(28, "No space left on device")


class _Spring(Source):
    """Declares what a test sets, and fails where the test says."""

    name = "the spring"

    def __init__(self, fails: str = "", *, is_required: bool = True) -> None:
        self.fails = fails
        self.is_required = is_required
        self.is_closed = False
        self.pipe = os.pipe()
        self.heard: list[Happening] = []

    def open(self, waiting: Waiting) -> None:
        waiting.watch(self.pipe[0], lambda: self.fail_at("watch"))
        waiting.timer("now", 0.0, lambda: self.fail_at("timer"))
        os.write(self.pipe[1], b"x")
        self.fail_at("open")

    def on_event(self, happening: Happening) -> None:
        self.heard.append(happening)
        self.fail_at("on_event")

    def close(self) -> None:
        self.is_closed = True
        self.fail_at("close")

    def fail_at(self, place: str) -> None:
        if self.fails == place:
            raise RuntimeError(place)


class _ObservedByTests(ObservedJob):
    """A job whose observers a test makes."""

    all: Sequence[Sink]

    def observing(self) -> Sequence[Sink]:
        return self.all


class _Room:
    """Observers with a loop, whose supervisor only writes down what is declared."""

    def __init__(self) -> None:
        self.remarks: list[str] = []
        self.declared: list[Declared] = []
        self.loop = Loop()

    def open(self, *observers: Sink) -> Observers:
        job = _ObservedByTests(plans.request(), {}, log=self.remarks.append)
        job.all = observers
        made = Observers(job, self.declared.append)
        made.prepare(plans.plan())
        made.open(self.loop)
        made.on_event(NEWS)
        return made


@pytest.fixture
def room() -> Iterator[_Room]:
    room = _Room()
    yield room
    room.loop.close()


def test_a_sink_that_fails_is_let_go_and_said_once(room: _Room) -> None:
    ear, first, second = _Ear(), _Deaf(), _Deaf()
    observers = room.open(first, second, ear)
    observers.on_event(NEWS)
    assert [len(sink.heard) for sink in (ear, first, second)] == [2, 1, 1]
    assert room.remarks == ["Deaf failed (No space left on device); the job goes on without it."]
    assert room.declared == []


@pytest.mark.parametrize("place", ["open", "on_event", "watch", "timer", "close"])
def test_wherever_a_source_fails_it_is_an_event(room: _Room, place: str) -> None:
    spring = _Spring(place)
    observers = room.open(spring)
    for _ in range(2):
        # A failed source leaves nothing to wait for.
        room.loop.timer("turn", 0.0, lambda: None)
        room.loop.turn()
    if place == "close":
        observers.close()
    (failed,) = room.declared
    assert isinstance(failed, SourceFailed)
    assert (failed.source, failed.is_required, failed.exit_code) == ("the spring", True, 1)
    assert failed.why == f"RuntimeError('{place}')"
    assert room.remarks == []
    # Its connected clients notice.
    assert spring.is_closed
