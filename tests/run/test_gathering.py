"""A round of gathering: answers now, later, wrong or never, and remarks meanwhile."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from plans import plan

from fleetrun.errors import EnvironmentFault
from fleetrun.run.gathering import AtOnce, Gathering, Round
from fleetrun.run.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleetrun.model import LaunchPlan
    from fleetrun.run.gathering import Answer
    from fleetrun.run.loop import Waiting

PLAN = plan()


class _Hosts(Gathering):
    """Waits for a byte in a pipe; is said to be waiting at every turn of the loop."""

    progress_s = 0.0

    def __init__(self, *, names: str = "10.0.0.2") -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.names = names
        self.cancelled = 0

    def begin(self, attempt: int, waiting: Waiting, answer: Answer) -> None:
        self.attempt = attempt

        def come() -> None:
            what = os.read(self.read_fd, 1)
            if what == b"!":
                raise EnvironmentFault("10.0.0.2 has another script.")
            answer(PLAN)

        waiting.watch(self.read_fd, come)

    def missing(self) -> str:
        if not self.names:
            raise KeyError("a bug")
        return self.names

    def cancel(self) -> None:
        self.cancelled += 1


class _Room:
    """A round on a loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.remarks: list[str] = []
        self.shown: list[str] = []
        self.answers: list[LaunchPlan | Exception] = []

    def begin(self, gathering: Gathering) -> Round:
        show = self.shown.append
        self.round = Round(gathering, 3, self.loop, self.remarks.append, self.take, progress=show)
        self.round.begin()
        return self.round

    def take(self, answer: LaunchPlan | Exception) -> None:
        self.answers.append(answer)
        self.round.end(is_answered=True)


@pytest.fixture
def room() -> Iterator[_Room]:
    room = _Room()
    yield room
    room.loop.close()


def test_who_knows_everything_answers_at_once(room: _Room) -> None:
    asked: list[int] = []

    def planned(attempt: int) -> LaunchPlan:
        asked.append(attempt)
        return PLAN

    room.begin(AtOnce(planned))
    assert (asked, room.answers, room.remarks) == ([3], [PLAN], [])


@pytest.mark.parametrize("error", [EnvironmentFault("Port 6070 is taken."), KeyError("bug")])
def test_what_is_raised_at_once_is_an_answer(room: _Room, error: Exception) -> None:
    def planned(attempt: int) -> LaunchPlan:
        assert attempt == 3
        raise error

    room.begin(AtOnce(planned))
    assert room.answers == [error]


def test_an_answer_comes_through_a_pipe_and_meanwhile_it_is_said_for_whom(room: _Room) -> None:
    hosts = _Hosts()
    room.begin(hosts)
    room.loop.turn()
    assert room.remarks[0].startswith("Waiting up to 600 s for 10.0.0.2.") or (
        room.remarks[0].startswith("Waiting up to 599 s for 10.0.0.2.")
    )
    os.write(hosts.write_fd, b".")
    room.loop.turn()
    assert (hosts.attempt, room.answers, hosts.cancelled) == (3, [PLAN], 0)


def test_for_whom_it_waits_is_shown_on_a_terminal_before_it_is_said(room: _Room) -> None:
    hosts = _Hosts()
    hosts.progress_s = 600.0
    room.begin(hosts)
    while not room.shown:
        room.loop.turn()
    (shown,) = room.shown
    assert "s for 10.0.0.2." in shown
    assert room.remarks == []


def test_what_a_callback_raises_is_an_answer(room: _Room) -> None:
    hosts = _Hosts()
    room.begin(hosts)
    os.write(hosts.write_fd, b"!")
    room.loop.turn()
    (answer,) = room.answers
    assert str(answer) == "10.0.0.2 has another script."


def test_who_cannot_even_say_for_whom_it_waits_has_failed(room: _Room) -> None:
    room.begin(_Hosts(names=""))
    room.loop.turn()
    (answer,) = room.answers
    assert isinstance(answer, KeyError)


def test_a_round_that_was_ended_hears_no_answer(room: _Room) -> None:
    hosts = _Hosts()
    room.begin(hosts).end(is_answered=False)
    os.write(hosts.write_fd, b".")
    room.loop.timer("turn", 0.0, lambda: None)
    room.loop.turn()
    assert (room.answers, hosts.cancelled) == ([], 1)


def test_who_did_not_come_in_time_is_named(room: _Room) -> None:
    hosts = _Hosts()
    error = room.begin(hosts).late()
    assert str(error) == "10.0.0.2 did not come within 600 s."
    assert (error.exit_code, hosts.cancelled) == (4, 1)
