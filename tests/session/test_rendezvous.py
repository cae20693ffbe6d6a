"""A host that cannot take part tells the others why."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fleetrun.errors import EnvironmentFault
from fleetrun.run.events import Failure
from fleetrun.session.driver import CODEC
from fleetrun.session.messages import (
    STOPPED,
    JoinRequest,
    Leave,
    RendezvousConfig,
    Report,
    RosterMessage,
    Verdict,
)
from fleetrun.session.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import LaunchPlan
    from fleetrun.run.loop import Loop
    from fleetrun.session.driver import Session
    from fleetrun.session.local_host import LocalHost

BARE = JoinRequest("10.0.0.1", "node-1", 7, (), ())
ROSTER = RosterMessage(0, 0, (), RendezvousConfig(2, 2))


class RecordedSession:
    """A fake session that keeps what it is told."""

    def __init__(self, config: RendezvousConfig = RendezvousConfig(2, 2)) -> None:  # noqa: B008 - a NamedTuple
        self.config = config
        self.failures: list[Failure | None] = []
        self.stopped = self.quit = self.failures.append
        self.remarks: list[str] = []
        self.shown = self.remarks.append
        self.launcher = "this one"
        self.serves = self.has_told_all = False
        self.link = None

    def open(self, waiting: object) -> None:
        """Open nothing."""

    def join(self, _request: JoinRequest, _fault: Failure | None = None) -> None:
        """Take note of nothing."""

    def report(self, stage: str) -> None:
        """Report nothing."""

    def flush(self) -> None:
        """Write nothing."""


class OwnHost:
    """A host that plans by PLAN."""

    bare = BARE

    def __init__(self, plan: Callable[[RosterMessage], LaunchPlan]) -> None:
        self.plan = plan

    def offer(self, _attempt: int) -> JoinRequest:
        """Bring nothing."""
        return BARE

    def settle(self, *, has_begun: bool) -> None:
        """Leave everything."""


def nothing_planned(_: RosterMessage) -> LaunchPlan:
    """Plan nothing."""
    return cast("LaunchPlan", ())


def begun(
    session: RecordedSession,
    loop: Loop,
    plan: Callable[[RosterMessage], LaunchPlan] = nothing_planned,
    *,
    answers: list[object] | None = None,
    attempt: int = 0,
) -> Rendezvous:
    """Let a host with an empty request join SESSION."""
    own = cast("LocalHost", OwnHost(plan))
    rendezvous = Rendezvous(
        cast("Session", session),
        own,
        redact=lambda text: text.replace("hunter2", "***"),
        log=session.remarks.append,
    )
    rendezvous.begin(attempt, loop, ([] if answers is None else answers).append)
    return rendezvous


def test_a_fault_of_any_length_can_be_read_by_the_others(loop: Loop) -> None:
    def plan(_roster: RosterMessage) -> LaunchPlan:
        raise EnvironmentFault(f"None of {'node, ' * 10_000} is here.")

    session = RecordedSession()
    begun(session, loop, plan).plan(ROSTER)
    (failure,) = session.failures
    assert failure is not None
    assert failure.what.startswith("None of node, node,")
    for message in (Report(0, STOPPED, failure), Leave(failure)):
        assert CODEC.read(CODEC.write(message)) == message


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
