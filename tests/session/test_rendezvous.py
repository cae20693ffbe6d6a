"""What a host that cannot take part tells the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fleetrun.errors import EnvironmentFault
from fleetrun.run.loop import Loop
from fleetrun.session.codec import Codec
from fleetrun.session.messages import MESSAGES, Failure, Leave, Offer, Roster, Stopped, Verdict
from fleetrun.session.rendezvous import Rendezvous
from fleetrun.session.terms import Terms

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import LaunchPlan
    from fleetrun.session.driver import Session

BARE = Offer("10.0.0.1", "node-1", 7, (), ())


def rendezvous(told: Told, plan: Callable[[Roster], LaunchPlan]) -> Rendezvous:
    """Make the gathering of a host that offers nothing, with the session TOLD."""
    return Rendezvous(
        cast("Session", told),
        offer=lambda _: BARE,
        bare=BARE,
        plan=plan,
        hide=lambda text: text.replace("hunter2", "***"),
        say=lambda _: None,
        terms=Terms(2, 2),
    )


class Told:
    """Stands for a session, and keeps what it is told."""

    def __init__(self) -> None:
        self.failures: list[Failure | None] = []
        self.planned = self.quit = self.failures.append
        self.offers = 0

    def open(self, waiting: object) -> None:
        """Open nothing."""

    def offer(self, offer: Offer) -> None:
        """Take note."""
        self.offers += 1


def test_a_fault_of_any_length_can_be_read_by_the_others() -> None:
    def plan(_roster: Roster) -> LaunchPlan:
        raise EnvironmentFault(f"None of {'node, ' * 10_000} is here.")

    told, codec, loop = Told(), Codec(MESSAGES), Loop()
    gathering = rendezvous(told, plan)
    gathering.begin(0, loop, lambda _: None)
    gathering.plan(Roster(0, 0, ()))
    loop.close()
    (failure,) = told.failures
    assert failure is not None
    assert failure.what.startswith("None of node, node,")
    for message in (Stopped(0, failure), Leave(failure)):
        assert codec.read(codec.write(message)) == message


def test_a_secret_in_a_fault_is_not_told_to_the_others() -> None:
    def plan(_roster: Roster) -> LaunchPlan:
        raise EnvironmentFault("--env=DB_PASSWORD=hunter2 is wrong.")

    told, loop = Told(), Loop()
    gathering = rendezvous(told, plan)
    gathering.begin(0, loop, lambda _: None)
    gathering.plan(Roster(0, 0, ()))
    gathering.conclude(Verdict(0, "", Failure("node-1", "failed", 3), is_final=True))
    loop.close()
    assert [failure and failure.what for failure in told.failures] == [
        "--env=DB_PASSWORD=*** is wrong",
        "Failed (on node-1)",
    ]


def test_who_is_lost_while_all_get_ready_is_done_without() -> None:
    def plan(_roster: Roster) -> LaunchPlan:
        return cast("LaunchPlan", ())

    told, loop = Told(), Loop()
    gathering = rendezvous(told, plan)
    gathering.begin(0, loop, lambda _: None)
    gathering.plan(Roster(0, 0, ()))
    lost = Failure("node-2", "nothing was heard of it", 1, is_departure=True)
    gathering.conclude(Verdict(0, "other", lost, is_final=False))
    loop.close()
    assert told.offers == 2
    assert told.failures == [None]
