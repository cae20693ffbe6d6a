"""A host that cannot take part tells the others why."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import pytest
from wire import turn_until

from fleetrun.errors import EnvironmentFault
from fleetrun.run.events import Failure
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
ROSTER = RosterMessage(0, 0, (), RendezvousConfig(2, 2))


class RecordedSession:
    """A fake session that keeps what it is told."""

    def __init__(self, config: RendezvousConfig = RendezvousConfig(2, 2)) -> None:  # noqa: B008 - a NamedTuple
        self.config = config
        self.failures: list[Failure | None] = []
        self.planned = self.quit = self.failures.append
        self.troubles: list[str] = []
        self.remarks: list[str] = []
        self.shown = self.remarks.append
        self.launcher = "this one"
        self.serves = self.is_connected = self.has_told_all = False
        self.until: float | None = None

    def open(self, waiting: object) -> None:
        """Open nothing."""

    def attend(self, handler: object) -> None:
        """Decide nothing."""

    def join(self, request: JoinRequest, _fault: Failure | None = None) -> None:
        """Take note."""
        self.troubles.append(request.trouble)

    def flush(self) -> None:
        """Write nothing."""

    def missing(self) -> str:
        """Return the names of the missing hosts."""
        return "a place"

    def waits_until(self) -> float | None:
        """Return until when they are waited for."""
        return self.until


def nothing_planned(_: RosterMessage) -> LaunchPlan:
    """Plan nothing."""
    return cast("LaunchPlan", ())


def begun(
    session: RecordedSession,
    loop: Loop,
    plan: Callable[[RosterMessage], LaunchPlan] = nothing_planned,
    *,
    offer: Callable[[int], JoinRequest] = lambda _: BARE,
    answers: list[object] | None = None,
    attempt: int = 0,
) -> Rendezvous:
    """Let a host with an empty request join SESSION."""
    rendezvous = Rendezvous(
        cast("Session", session),
        offer=offer,
        bare=BARE,
        plan=plan,
        redact=lambda text: text.replace("hunter2", "***"),
        log=session.remarks.append,
        health=lambda: "its disk is full",
    )
    rendezvous.begin(attempt, loop, ([] if answers is None else answers).append)
    return rendezvous


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_host_is_checked_before_each_restart_of_a_job_that_may_go_on_without_it(
    attempt: int, loop: Loop
) -> None:
    session = RecordedSession(RendezvousConfig(1, 2))
    begun(session, loop, attempt=attempt)
    turn_until(loop, lambda: session.troubles)
    assert session.troubles == [["", "its disk is full"][attempt]]


def test_a_fault_of_any_length_can_be_read_by_the_others(loop: Loop) -> None:
    def plan(_roster: RosterMessage) -> LaunchPlan:
        raise EnvironmentFault(f"None of {'node, ' * 10_000} is here.")

    session = RecordedSession()
    begun(session, loop, plan).plan(ROSTER)
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

    session = RecordedSession(RendezvousConfig(2, 2, rdzv_timeout_s=0.01))
    begun(session, loop, offer=offer, answers=answers)
    turn_until(loop, lambda: bool(answers))
    assert answers == [fault]


def test_a_wait_names_the_timeout_that_counts(loop: Loop) -> None:
    session = RecordedSession()
    rendezvous = begun(session, loop)
    assert rendezvous.progress(700.0) == "Waiting up to 600 s for a place."
    session.until = time.monotonic() + 15.0
    assert rendezvous.progress(700.0) == "Waiting up to 15 s for a place."


def test_a_secret_in_a_fault_is_not_told_to_the_others(loop: Loop) -> None:
    def plan(_roster: RosterMessage) -> LaunchPlan:
        raise EnvironmentFault("--env=DB_PASSWORD=hunter2 is wrong.")

    session = RecordedSession()
    rendezvous = begun(session, loop, plan)
    rendezvous.plan(ROSTER)
    rendezvous.conclude(Verdict(0, "other", Failure("node-1", "failed", 3), is_final=True))
    assert [failure and failure.what for failure in session.failures] == [
        "--env=DB_PASSWORD=*** is wrong",
        "Failed (on node-1)",
    ]


def test_who_is_lost_while_all_get_ready_is_done_without(loop: Loop) -> None:
    session = RecordedSession()
    rendezvous = begun(session, loop)
    rendezvous.plan(ROSTER)
    lost = Failure("node-2", "nothing was heard of it", 1, is_departure=True)
    rendezvous.conclude(Verdict(0, "other", lost, is_final=False))
    assert len(session.troubles) == 2
    assert session.failures == [None]
