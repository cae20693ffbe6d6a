"""What a host that cannot take part tells the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fleetrun.errors import EnvironmentFault
from fleetrun.run.loop import Loop
from fleetrun.session.codec import Codec
from fleetrun.session.messages import MESSAGES, Failure, Leave, Offer, Roster, Stopped
from fleetrun.session.rendezvous import Rendezvous

if TYPE_CHECKING:
    from fleetrun.model import LaunchPlan
    from fleetrun.session.driver import Session

BARE = Offer("10.0.0.1", "node-1", 7, (), ())


class Told:
    """Stands for a session, and keeps what it is told."""

    def __init__(self) -> None:
        self.failures: list[Failure | None] = []
        self.planned = self.quit = self.failures.append

    def open(self, waiting: object) -> None:
        """Open nothing."""

    def offer(self, offer: Offer) -> None:
        """Offer nothing."""


def test_a_fault_of_any_length_can_be_read_by_the_others() -> None:
    def plan(_attempt: int, _roster: Roster) -> LaunchPlan:
        raise EnvironmentFault(f"None of {'node, ' * 10_000} is here.")

    told, codec, loop = Told(), Codec(MESSAGES), Loop()
    rendezvous = Rendezvous(
        cast("Session", told), offer=lambda _: BARE, bare=BARE, plan=plan, timeout_s=60.0
    )
    rendezvous.begin(0, loop, lambda _: None)
    rendezvous.plan(Roster(0, 0, ()))
    loop.close()
    (failure,) = told.failures
    assert failure is not None
    assert failure.what.startswith("None of node, node,")
    for message in (Stopped(0, failure), Leave(failure)):
        assert codec.read(codec.write(message)) == message
