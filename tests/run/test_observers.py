"""Sinks and sources: which events they get, and what a failure of each means."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

import plans
import pytest
from timers import Timers
from waiting import until

from fleetrun.errors import EnvironmentFault
from fleetrun.run.events import Declared, Happening, RunWarning, SourceFailed, TimerExpired
from fleetrun.run.loop import Loop
from fleetrun.run.observers import Chores, ObservedJob, Observers, Sink, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


class _Mute(_Ear):
    """Fails when it is closed."""

    def close(self) -> None:
        raise OSError(28, "No space left on device")


class _Spring(Source):
    """Declares what a test sets, and fails where the test says."""

    name = "the spring"
    without = "without water"

    def __init__(self, fails: str = "", *, is_required: bool = True) -> None:
        self.fails = fails
        self.is_required = is_required
        self.is_closed = False
        self.pipe = os.pipe()
        self.heard: list[Happening] = []

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        self.declare = declare
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

    early: Sequence[Sink | Source]
    late: Sequence[Sink | Source]

    load: Callable[[], Iterator[None]] | None = None

    def preparing(self) -> Sequence[Sink | Source]:
        return self.early

    def loading(self) -> Iterator[None]:
        return super().loading() if self.load is None else self.load()

    def observing(self) -> Sequence[Sink | Source]:
        return self.late


class _Room:
    """Observers with a loop, whose supervisor only writes down what is declared."""

    def __init__(self) -> None:
        self.remarks: list[str] = []
        self.declared: list[Declared] = []
        self.loop = Loop()

    def open(self, *observers: Sink | Source) -> Observers:
        job = _ObservedByTests(plans.request(), {}, log=self.remarks.append)
        job.early = observers[:1]
        job.late = observers[1:]
        made = Observers(job, self.declared.append)
        made.prepare(plans.plan())
        made.on_event(NEWS)
        made.open(self.loop)
        return made


@pytest.fixture
def room() -> Iterator[_Room]:
    room = _Room()
    yield room
    room.loop.close()


def test_what_happened_before_they_were_opened_is_told_then(room: _Room) -> None:
    ear, spring = _Ear(), _Spring()
    observers = room.open(ear, spring)
    observers.on_event(NEWS)
    assert ear.heard == spring.heard == [NEWS, NEWS]
    assert not observers.is_busy()
    assert not observers.shows(0)


def test_what_is_told_later_has_the_moment_when_it_happened(room: _Room) -> None:
    job = _ObservedByTests(plans.request(), {}, log=plans.refuse)
    moments: list[tuple[float, int]] = []

    class _Witness(_Ear):
        def on_event(self, happening: Happening) -> None:
            moments.append((job.happened_at, job.happened_ns()))

    job.early, job.late = [_Witness()], []
    observers = Observers(job, room.declared.append)
    observers.prepare(plans.plan())
    observers.on_event(NEWS)
    happened_by = time.monotonic(), time.time_ns()
    until(lambda: time.monotonic() > happened_by[0] + 0.05)
    observers.open(room.loop)
    observers.on_event(NEWS)
    told, now = moments
    assert told[0] <= happened_by[0]
    assert told[1] <= happened_by[1]
    assert now[0] >= happened_by[0] + 0.05
    assert now[1] - told[1] == pytest.approx((now[0] - told[0]) * 1e9, abs=2e7)


def test_an_exit_does_not_wait_for_what_observers_load(
    room: _Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetrun.run.observers._MOMENT_S", 0.0)
    calls: list[str] = []
    reader, writer = os.pipe()

    def load() -> Iterator[None]:
        for number in range(2):
            calls.append(f"load {number}")
            os.write(writer, b"x")
            yield

    def exited() -> None:
        os.read(reader, 1)
        calls.append("exit")
        observers.on_event(NEWS)

    class Slow(_Ear):
        def open(self, waiting: Waiting) -> None:
            waiting.timer("now", 0.0, lambda: calls.append(f"told {len(self.heard)}"))

    job = _ObservedByTests(plans.request(), {}, log=plans.refuse)
    job.early, job.late, job.load = [], [Slow(), _Ear()], load
    observers = Observers(job, room.declared.append)
    observers.prepare(plans.plan())
    room.loop.watch(reader, exited)
    observers.open_later(room.loop, 0.0)
    while len(calls) < 5:
        room.loop.turn()
    # An observer's own turn comes when it has been told all.
    assert calls == ["load 0", "exit", "load 1", "exit", "told 2"]
    os.close(reader)
    os.close(writer)


def test_a_source_may_make_the_supervisor_open_the_others_at_once(room: _Room) -> None:
    class Hasty(Source):
        def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
            declare(RunWarning("stopped", "rank 0 is stopped", 1.0))

    ear = _Ear()
    job = _ObservedByTests(plans.request(), {}, log=plans.refuse)
    job.early, job.late = [], [Hasty(), ear]

    def declared(happening: Declared) -> None:
        observers.open(room.loop)
        assert isinstance(happening, RunWarning)
        observers.on_event(happening)

    observers = Observers(job, declared)
    observers.prepare(plans.plan())
    observers.open(room.loop)
    assert [type(heard) for heard in ear.heard] == [RunWarning]


def test_a_sink_that_fails_at_the_end_keeps_no_job_going(room: _Room) -> None:
    observers = room.open(_Mute())
    observers.close()
    assert room.remarks == ["The mute failed (No space left on device)."]


def test_sinks_are_told_first_and_nobody_of_what_was_before_they_were_prepared(
    room: _Room,
) -> None:
    calls: list[str] = []

    class First(Sink):
        def on_event(self, happening: Happening) -> None:
            calls.append("sink")

    class Second(Source):
        def on_event(self, happening: Happening) -> None:
            calls.append("source")

    job = _ObservedByTests(plans.request(), {}, log=plans.refuse)
    job.early, job.late = [Second()], [First()]
    observers = Observers(job, room.declared.append)
    observers.on_event(NEWS)
    observers.prepare(plans.plan())
    observers.on_event(NEWS)
    observers.open(room.loop)
    assert calls == ["sink", "source"]


def test_a_sink_that_fails_is_let_go_and_said_once(room: _Room) -> None:
    ear, first, second = _Ear(), _Deaf(), _Deaf()
    observers = room.open(first, second, ear)
    observers.on_event(NEWS)
    assert [len(sink.heard) for sink in (ear, first, second)] == [2, 1, 1]
    assert room.remarks == [
        "The deaf failed (No space left on device); the job goes on without it."
    ]
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
    assert failed.sentence() == (
        f"The spring failed (RuntimeError('{place}')), and the job cannot go on without water."
    )
    assert room.remarks == []
    # Its connected clients notice.
    assert spring.is_closed


def test_a_source_that_has_failed_hears_and_declares_nothing_more(room: _Room) -> None:
    spring = _Spring("on_event")
    observers = room.open(spring)
    observers.on_event(NEWS)
    spring.declare(RunWarning("stopped", "rank 0 is stopped", 1.0))
    assert spring.heard == [NEWS]
    assert len(room.declared) == 1


def test_a_source_that_is_not_needed_is_said_once(room: _Room) -> None:
    room.open(_Spring("on_event", is_required=False))
    assert room.remarks == [
        "The spring failed (RuntimeError('on_event')); the job goes on without water."
    ]
    assert len(room.declared) == 1


def test_what_cannot_be_prepared_keeps_everything_from_starting(room: _Room) -> None:
    class Refuses(Sink):
        def prepare(self) -> None:
            raise EnvironmentFault("no room")

    with pytest.raises(EnvironmentFault, match="no room"):
        room.open(Refuses())


def test_listeners_are_closed_in_the_order_opposite_to_their_opening(room: _Room) -> None:
    closed: list[str] = []

    class Closes(Sink):
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    room.open(Closes("messages"), Closes("log")).close()
    assert closed == ["log", "messages"]


def test_each_chore_is_done_once_and_at_the_end_at_the_latest() -> None:
    timers, done = Timers(), list[str]()
    chores = Chores(timers)
    for name in ("early", "late"):
        chores.add(name, 1.0, partial(done.append, name))
    assert timers.elapse("early")
    chores.finish()
    timers.elapse("late")
    chores.finish()
    assert done == ["early", "late"]


def test_late_work_waits_where_ranks_need_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    job = plans.job(plans.plan(per_node=2))
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    # The Pythons of the ranks take 20 ms of a processor to start.
    for processors, began_at, delay_s in (
        (3, 100.0, 0.0),
        (2, 0.0, 0.5),
        (2, 100.0, 0.52),
        (1, 100.0, 0.54),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: range(count))
        job.began_at = began_at
        assert job.late_s(0.5) == pytest.approx(delay_s)
