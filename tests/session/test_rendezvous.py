"""A host that cannot take part tells the others why."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from wire import turn_until

from fleetrun.errors import EnvironmentFault
from fleetrun.run.events import Failure
from fleetrun.session import health as checks
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.driver import CODEC
from fleetrun.session.messages import JoinRequest, Leave, RosterMessage, Stopped, Verdict
from fleetrun.session.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import LaunchPlan
    from fleetrun.run.loop import Loop
    from fleetrun.session.driver import Session

BARE = JoinRequest("10.0.0.1", "node-1", 7, (), ())


def rendezvous(
    session: RecordedSession,
    plan: Callable[[RosterMessage], LaunchPlan] = lambda _: cast("LaunchPlan", ()),
    *,
    health: Callable[[], str] | None = None,
    warm: Callable[[], str] | None = None,
    offer: Callable[[int], JoinRequest] = lambda _: BARE,
) -> Rendezvous:
    """Make the gathering of a host with an empty request, in SESSION."""
    return Rendezvous(
        cast("Session", session),
        offer=offer,
        bare=BARE,
        plan=plan,
        redact=lambda text: text.replace("hunter2", "***"),
        log=session.remarks.append,
        health=health,
        warm=warm,
    )


class RecordedSession:
    """A fake session that keeps what it is told."""

    def __init__(self) -> None:
        self.config = RendezvousConfig(2, 2)
        self.failures: list[Failure | None] = []
        self.planned = self.quit = self.failures.append
        self.offers = 0
        self.troubles: list[str] = []
        self.remarks: list[str] = []
        self.launcher = "this one"
        self.serves = False
        self.shown = self.remarks.append

    def open(self, waiting: object) -> None:
        """Open nothing."""

    def attend(self, handler: object) -> None:
        """Decide nothing."""

    def join(self, request: JoinRequest, _fault: Failure | None = None) -> None:
        """Take note."""
        self.offers += 1
        self.troubles.append(request.trouble)

    is_connected = has_told_all = False

    def flush(self) -> None:
        """Write nothing."""

    def missing(self) -> str:
        """Return the names of the missing hosts."""
        return "a place"

    limited: tuple[str, float] | None = None

    def limit(self) -> tuple[str, float] | None:
        """Return how long they are waited for."""
        return self.limited


def test_a_fault_of_any_length_can_be_read_by_the_others(loop: Loop) -> None:
    def plan(_roster: RosterMessage) -> LaunchPlan:
        raise EnvironmentFault(f"None of {'node, ' * 10_000} is here.")

    session = RecordedSession()
    gathering = rendezvous(session, plan)
    gathering.begin(0, loop, lambda _: None)
    gathering.plan(RosterMessage(0, 0, (), RendezvousConfig(2, 2)))
    (failure,) = session.failures
    assert failure is not None
    assert failure.what.startswith("None of node, node,")
    for message in (Stopped(0, failure), Leave(failure)):
        assert CODEC.read(CODEC.write(message)) == message


def test_a_host_with_a_fault_ends_with_it_if_nobody_comes(loop: Loop) -> None:
    fault = EnvironmentFault("Port 6070 is taken.")
    answers: list[object] = []

    def offer(_: int) -> JoinRequest:
        raise fault

    told = RecordedSession()
    told.config = RendezvousConfig(2, 2, rdzv_timeout_s=0.01)
    gathering = rendezvous(told, offer=offer)
    gathering.begin(0, loop, answers.append)
    turn_until(loop, lambda: bool(answers))
    assert answers == [fault]


def test_a_wait_names_the_timeout_that_counts(loop: Loop) -> None:
    session = RecordedSession()
    gathering = rendezvous(session)
    gathering.begin(0, loop, lambda _: None)
    assert gathering.progress(700.0) == "Waiting up to 600 s for a place."
    session.limited = "--elastic_timeout", time.monotonic() + 15.0
    assert gathering.progress(700.0) == "Waiting up to 15 s (--elastic_timeout) for a place."


def test_a_secret_in_a_fault_is_not_told_to_the_others(loop: Loop) -> None:
    def plan(_roster: RosterMessage) -> LaunchPlan:
        raise EnvironmentFault("--env=DB_PASSWORD=hunter2 is wrong.")

    session = RecordedSession()
    gathering = rendezvous(session, plan)
    gathering.begin(0, loop, lambda _: None)
    gathering.plan(RosterMessage(0, 0, (), RendezvousConfig(2, 2)))
    gathering.conclude(Verdict(0, "other", Failure("node-1", "failed", 3), is_final=True))
    assert [failure and failure.what for failure in session.failures] == [
        "--env=DB_PASSWORD=*** is wrong",
        "Failed (on node-1)",
    ]


def test_who_is_lost_while_all_get_ready_is_done_without(loop: Loop) -> None:
    session = RecordedSession()
    gathering = rendezvous(session)
    gathering.begin(0, loop, lambda _: None)
    gathering.plan(RosterMessage(0, 0, (), RendezvousConfig(2, 2)))
    lost = Failure("node-2", "nothing was heard of it", 1, is_departure=True)
    gathering.conclude(Verdict(0, "other", lost, is_final=False))
    assert session.offers == 2
    assert session.failures == [None]


def stands_by(
    session: RecordedSession,
    loop: Loop,
    health: Callable[[], str],
    warm: Callable[[], str] | None = None,
) -> Rendezvous:
    """Let a host stand by, and then have a place."""
    session.config = RendezvousConfig(2, 2, spares=1)
    gathering = rendezvous(session, health=health, warm=warm)
    gathering.begin(0, loop, lambda _: None)
    gathering.stand_by()
    return gathering


def test_who_stood_by_plans_when_it_is_known_to_be_well(loop: Loop) -> None:
    session = RecordedSession()
    gathering = stands_by(session, loop, health=str, warm=str)
    gathering.plan(RosterMessage(1, 0, (), RendezvousConfig(2, 2)))
    assert not session.failures
    turn_until(loop, lambda: session.failures)
    gathering._abandon()
    assert session.failures[0] is None


def test_who_stood_by_and_is_not_well_gives_its_place_to_another(loop: Loop) -> None:
    session = RecordedSession()
    gathering = stands_by(session, loop, health=lambda: "its disk is full")
    gathering.plan(RosterMessage(1, 0, (), RendezvousConfig(2, 2)))
    turn_until(loop, lambda: session.failures)
    (failure,) = session.failures
    assert failure is not None
    assert (failure.what, failure.is_departure) == ("it was a spare, and its disk is full", True)
    gathering.conclude(Verdict(1, "me", failure, is_final=False))
    turn_until(loop, lambda: session.offers == 2)
    assert session.troubles == ["", "its disk is full"]
    # If it is needed all the same, it takes part.
    gathering.plan(RosterMessage(2, 0, (), RendezvousConfig(2, 2)))
    assert session.failures[1:] == [None]
    gathering._abandon()


def test_who_stands_by_finds_out_whether_paddle_can_be_imported(loop: Loop) -> None:
    session = RecordedSession()
    gathering = stands_by(session, loop, str, lambda: checks.import_trouble("no_paddle"))
    turn_until(loop, lambda: len(session.remarks) > 1)
    assert "No module named 'no_paddle'" in session.remarks[1]
    gathering.plan(RosterMessage(1, 0, (), RendezvousConfig(2, 2)))
    turn_until(loop, lambda: session.failures)
    (failure,) = session.failures
    assert failure is not None
    assert "Paddle cannot be imported" in failure.what
    gathering._abandon()
    assert checks.import_trouble("json") == ""
