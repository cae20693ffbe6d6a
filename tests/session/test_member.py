"""A launcher that loses its coordinator: what it says, and with which verdict it ends."""

from __future__ import annotations

import pytest

from fleetrun.run.events import Failure, TimerExpired
from fleetrun.session import member
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.messages import (
    Failed,
    HostReady,
    Join,
    JoinRequest,
    Redialing,
    RosterMessage,
    Start,
    Stopped,
    Verdict,
)

OFFER = JoinRequest("", "node-2", 7, (7000,), ((),))
OWN = Failure("node-2", "rank 2 exited with 9", 9)
THEIRS = Failure("node-3", "rank 3 exited with 7", 7)


class Launcher:
    """A launcher whose ranks run, and what it has done since."""

    def __init__(self) -> None:
        self.now = 100.0
        config = RendezvousConfig(3, 3)
        self.state = member.begin(config, "launcher 2", "node-1", self.now, is_local=False)
        self.done: list[member.Action] = []
        for event in (
            member.Connected(self.now),
            member.JoinRequested(OFFER, self.now),
            member.Heard(RosterMessage(0, 0, (), RendezvousConfig(3, 3)), self.now),
            member.Said(HostReady(0), self.now),
            member.Heard(Start(0), self.now),
        ):
            self.feed(event)
        self.done.clear()

    def feed(self, event: member.Event) -> None:
        """Take an event, and keep what is done."""
        self.state, actions = member.step(self.state, event)
        self.done += actions

    def wait(self, seconds: float) -> None:
        """Let time pass without a word of the coordinator."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, max(self.now + 0.01, self.state.wake_at))
            self.feed(TimerExpired(self.now))

    def said(self) -> list[object]:
        """Return what it has sent."""
        return [one.message for one in self.done if isinstance(one, member.SendToCoordinator)]

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts with which it has ended."""
        return [
            one.message
            for one in self.done
            if isinstance(one, member.Deliver) and isinstance(one.message, Verdict)
        ]


def joined() -> Launcher:
    """Return one that has said what it offers, and has heard nothing yet."""
    launcher = Launcher()
    launcher.state = member.begin(
        RendezvousConfig(3, 3), "launcher 2", "node-1", launcher.now, is_local=False
    )
    launcher.feed(member.Connected(launcher.now))
    launcher.feed(member.JoinRequested(OFFER, launcher.now))
    return launcher


def test_who_is_cut_off_blames_nobody_who_fails_by_itself() -> None:
    one = Launcher()
    one.wait(7.5)
    one.feed(member.Connected(one.now))
    (failed,) = [each for each in one.said() if isinstance(each, Failed)]
    assert failed.failure.is_victim


def test_a_connection_that_is_given_up_is_said_to_be() -> None:
    one = Launcher()
    one.wait(3.6)
    assert Redialing(0) in one.said()
    assert isinstance(one.done[-1], member.Redial)


def test_who_was_cut_off_still_takes_the_verdict_of_the_coordinator() -> None:
    launcher = Launcher()
    launcher.wait(7.5)
    launcher.feed(member.Said(Stopped(0, None), launcher.now))
    assert launcher.verdicts() == []
    launcher.feed(member.Connected(launcher.now))
    assert any(isinstance(each, Stopped) for each in launcher.said())
    verdict = Verdict(0, "launcher 3", THEIRS, is_final=True)
    launcher.feed(member.Heard(verdict, launcher.now))
    assert launcher.verdicts() == [verdict]


def test_a_launcher_says_to_which_job_of_a_name_it_belongs() -> None:
    one = joined()
    one.feed(
        member.Heard(RosterMessage(0, 0, (), RendezvousConfig(3, 3), session="this one"), one.now)
    )
    one.feed(member.Disconnected(one.now))
    one.feed(member.Connected(one.now))
    joins = [each.session for each in one.said() if isinstance(each, Join)]
    assert joins == ["", "this one"]


def test_before_anything_runs_a_busy_coordinator_has_the_whole_timeout_to_answer() -> None:
    one = joined()
    one.wait(9.0)
    assert not [each for each in one.done if isinstance(each, member.Redial)]
    # What was unanswered waited behind the rosters of the others.
    one.feed(member.Heard(RosterMessage(0, 0, (), RendezvousConfig(3, 3)), one.now))
    one.wait(3.0)
    assert not [each for each in one.done if isinstance(each, member.Redial)]
    one.wait(2.4)
    assert isinstance(one.done[-1], member.Redial)


def test_who_joins_and_hears_nothing_for_the_whole_timeout_calls_again() -> None:
    one = joined()
    one.wait(12.5)
    assert isinstance(one.done[-1], member.Redial)


def test_who_reaches_no_coordinator_ends_within_the_timeout() -> None:
    launcher = Launcher()
    launcher.wait(7.5)
    launcher.feed(member.Said(Stopped(0, None), launcher.now))
    launcher.wait(2.6)
    (verdict,) = launcher.verdicts()
    assert verdict.failure is not None
    assert verdict.failure.what.startswith("this host was cut off from the coordinator")


def test_a_coordinator_that_is_lost_hides_no_failure_of_this_hosts_ranks() -> None:
    launcher = Launcher()
    launcher.feed(member.Said(Failed(0, OWN), launcher.now))
    launcher.feed(member.Disconnected(launcher.now))
    launcher.feed(member.Said(Stopped(0, OWN), launcher.now))
    launcher.wait(5.0)
    (verdict,) = launcher.verdicts()
    assert (verdict.failure, verdict.launcher) == (OWN, "launcher 2")
    assert verdict.given_up == "the coordinator of the job was lost"


@pytest.mark.parametrize(
    ("max_restarts", "own", "is_final", "given_up"),
    [
        (0, None, True, ""),
        (1, None, False, ""),
        (0, OWN, True, "the coordinator of the job was lost"),
        (1, OWN, False, ""),
        (1, OWN._replace(no_retry="no such module"), True, "the coordinator of the job was lost"),
    ],
)
def test_who_loses_a_coordinator_that_can_be_replaced_goes_on_if_the_rules_allow_it(
    max_restarts: int, own: Failure | None, given_up: str, *, is_final: bool
) -> None:
    launcher = Launcher()
    config = launcher.state.config._replace(has_store=True, max_restarts=max_restarts)
    launcher.state = launcher.state._replace(config=config)
    if own is not None:
        launcher.feed(member.Said(Failed(0, own), launcher.now))
    launcher.feed(member.Disconnected(launcher.now))
    launcher.wait(5.0)
    launcher.feed(member.Said(Stopped(0, own), launcher.now))
    launcher.wait(5.0)
    (verdict,) = launcher.verdicts()
    assert (verdict.is_final, verdict.given_up) == (is_final, given_up)


def test_what_cannot_be_planned_has_stopped_and_words_about_another_generation_are_dropped() -> (
    None
):
    one = joined()
    one.feed(member.Heard(RosterMessage(1, 0, (), RendezvousConfig(3, 3)), one.now))
    one.done.clear()
    one.feed(member.Said(HostReady(0), one.now))
    assert one.said() == []
    one.feed(member.Said(Stopped(1, OWN), one.now))
    assert one.said() == [Stopped(1, OWN)]
