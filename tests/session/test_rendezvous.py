"""A host that cannot take part tells the others why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from fleetrun.errors import EnvironmentFault
from fleetrun.run.events import Failure
from fleetrun.session import messages
from fleetrun.session.driver import CODEC
from fleetrun.session.rendezvous import Rendezvous

if TYPE_CHECKING:
    from fleetrun.run.loop import Loop
    from fleetrun.session.driver import Session
    from fleetrun.session.local_host import LocalHost

CONFIG = messages.RendezvousConfig(2, 2)
ROSTER = messages.RosterMessage(0, 0, (), CONFIG)


class RecordedSession:
    """A fake session that keeps the failures that it is told."""

    config, launcher, link = CONFIG, "this one", None
    serves = has_told_all = False

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.stopped = self.quit = self.failures.append

    def open(self, waiting: object) -> None:
        """Open nothing."""

    def join(self, request: messages.JoinRequest) -> None:
        """Take note of nothing."""


class OwnHost:
    """A host that cannot plan because of FAULT."""

    bare = messages.JoinRequest("10.0.0.1", "node-1", 7, (), ())

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def offer(self, _attempt: int) -> messages.JoinRequest:
        """Bring nothing."""
        return self.bare

    def plan(self, _roster: messages.RosterMessage) -> Any:
        """Plan nothing."""
        raise EnvironmentFault(self._fault)

    def settle(self, *, has_begun: bool) -> None:
        """Leave everything."""


def planned(session: RecordedSession, fault: str, loop: Loop) -> Rendezvous:
    """Let a host join SESSION, and fail to plan because of FAULT."""
    rendezvous = Rendezvous(
        cast("Session", session),
        cast("LocalHost", OwnHost(fault)),
        redact=lambda text: text.replace("hunter2", "***"),
        log=lambda _: None,
    )
    rendezvous.begin(0, loop, lambda _: None)
    rendezvous.plan(ROSTER)
    return rendezvous


def test_a_fault_of_any_length_can_be_read_by_the_others(loop: Loop) -> None:
    session = RecordedSession()
    planned(session, f"None of {'node, ' * 10_000} is here.", loop)
    (failure,) = session.failures
    assert failure.what.startswith("None of node, node,")
    for message in (messages.Report(0, messages.STOPPED, failure), messages.Leave(failure)):
        assert CODEC.read(CODEC.write(message)) == message


def test_a_secret_in_a_fault_is_not_told_to_the_others(loop: Loop) -> None:
    session = RecordedSession()
    rendezvous = planned(session, "--env=DB_PASSWORD=hunter2 is wrong.", loop)
    failure = Failure("node-1", "failed", 3)
    rendezvous.conclude(messages.Verdict(0, "other", failure, is_final=True))
    assert [failure.what for failure in session.failures] == [
        "--env=DB_PASSWORD=*** is wrong",
        "Failed (on node-1)",
    ]
