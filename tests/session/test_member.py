"""A launcher that loses its coordinator, or is itself stopped (SIGSTOP, a suspended host)."""

from __future__ import annotations

import itertools
from typing import TypeVar

import pytest

from fleetrun.run.events import Failure, TimerExpired
from fleetrun.session import member
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.member import (
    Connected,
    Deliver,
    Disconnected,
    Fence,
    Heard,
    JoinRequested,
    KillAt,
    Redial,
    Said,
    SendToCoordinator,
)
from fleetrun.session.messages import (
    Acknowledged,
    Entry,
    Failed,
    HostReady,
    Join,
    JoinRequest,
    Redialing,
    Refused,
    RosterMessage,
    Start,
    Stop,
    Stopped,
    Verdict,
)

M = TypeVar("M")

CONFIG = RendezvousConfig(2, 2, heartbeat_timeout_s=10.0)
# This job goes on with one host of two.
ELASTIC = RendezvousConfig(1, 2, heartbeat_timeout_s=10.0)
OWN = Failure("node-2", "rank 2 exited with 9", 9)
THEIRS = Failure("node-3", "rank 3 exited with 7", 7)
KILLED = Failure("node-2", "rank 0 was killed by SIGKILL", 137)
ENTRY = Entry("me", "10.0.0.2", "node-2", (7000,), ((),))
OTHER = ENTRY._replace(launcher="first", host="10.0.0.1")


class Launcher:
    """A launcher that has joined, and its actions since."""

    def __init__(self, config: RendezvousConfig = CONFIG, *, is_local: bool = False) -> None:
        self.now = 100.0
        self.done: list[member.Action] = []
        self.state = member.begin(config, "me", "10.0.0.1", self.now, is_local=is_local)
        offer = JoinRequest("", "node-2", 7, (7000,), ((),))
        self.feed(Connected(self.now), JoinRequested(offer, self.now))

    def feed(self, *events: member.Event) -> None:
        """Take events and keep the actions."""
        for event in events:
            self.state, actions = member.step(self.state, event)
            self.done += actions

    def wait(self, seconds: float) -> None:
        """Let time pass without a message of the coordinator."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, max(self.now + 0.01, self.state.wake_at))
            self.feed(TimerExpired(self.now))

    def beat(self) -> None:
        """Let a minute pass in which every heartbeat is answered."""
        until = self.now + 60.0
        while self.state.wake_at < until:
            self.now = self.state.wake_at
            self.feed(TimerExpired(self.now))
            self.feed(Heard(Acknowledged(self.state.number), self.now + 0.01))

    def sent(self, kind: type[M]) -> list[M]:
        """Return the messages of a kind that the coordinator got."""
        return self._messages(SendToCoordinator, kind)

    def delivered(self, kind: type[M]) -> list[M]:
        """Return the messages of a kind that the driver of this host got."""
        return self._messages(Deliver, kind)

    def _messages(self, way: type[SendToCoordinator | Deliver], kind: type[M]) -> list[M]:
        return [
            action.message
            for action in self.done
            if isinstance(action, way) and isinstance(action.message, kind)
        ]

    def redials(self) -> list[Redial]:
        """Return how often it gave up its connection."""
        return [action for action in self.done if isinstance(action, Redial)]

    def kills(self) -> list[float | None]:
        """Return the moments that were set for the death of its ranks."""
        return [action.at for action in self.done if isinstance(action, KillAt)]

    def why(self) -> str:
        """Return why the ranks are stopped."""
        (stop,) = self.delivered(Stop)
        return stop.failure.what

    def end(self) -> str:
        """Return the failure with which it ends."""
        (verdict,) = self.delivered(Verdict)
        assert verdict.failure is not None
        assert verdict.failure.host == "node-2"
        return verdict.failure.what


def running(
    config: RendezvousConfig = CONFIG,
    entries: tuple[Entry, ...] = (ENTRY, OTHER),
    *,
    is_local: bool = False,
) -> Launcher:
    """Return a launcher whose ranks run."""
    launcher = Launcher(config, is_local=is_local)
    launcher.feed(Heard(RosterMessage(0, 0, entries, config), launcher.now))
    launcher.feed(Said(HostReady(0), launcher.now))
    launcher.done.clear()
    launcher.feed(Heard(Start(0), launcher.now))
    assert launcher.state.phase == member.RUNNING
    return launcher


def suspended(config: RendezvousConfig = CONFIG) -> Launcher:
    """Return a launcher that runs again after it stood still for 45 s."""
    launcher = running(config)
    launcher.beat()
    launcher.now += 45.0
    return launcher


def test_who_is_cut_off_blames_nobody_who_fails_by_itself() -> None:
    launcher = running()
    launcher.wait(7.5)
    launcher.feed(Connected(launcher.now))
    (failed,) = launcher.sent(Failed)
    assert failed.failure.is_victim


def test_a_connection_that_is_given_up_is_said_to_be() -> None:
    launcher = running()
    launcher.wait(3.6)
    assert launcher.sent(Redialing) == [Redialing(0)]
    assert isinstance(launcher.done[-1], Redial)


def test_who_was_cut_off_still_takes_the_verdict_of_the_coordinator() -> None:
    launcher = running()
    launcher.wait(7.5)
    launcher.feed(Said(Stopped(0, None), launcher.now))
    assert launcher.delivered(Verdict) == []
    launcher.feed(Connected(launcher.now))
    assert launcher.sent(Stopped)
    verdict = Verdict(0, "launcher 3", THEIRS, is_final=True)
    launcher.feed(Heard(verdict, launcher.now))
    assert launcher.delivered(Verdict) == [verdict]


def test_a_launcher_says_to_which_job_of_a_name_it_belongs() -> None:
    launcher = Launcher()
    roster = RosterMessage(0, 0, (), CONFIG, session="this one")
    now = launcher.now
    launcher.feed(Heard(roster, now), Disconnected(now), Connected(now))
    assert [join.session for join in launcher.sent(Join)] == ["", "this one"]


def test_before_anything_runs_a_busy_coordinator_has_the_whole_timeout_to_answer() -> None:
    launcher = Launcher()
    launcher.wait(9.0)
    assert not launcher.redials()
    # The unanswered heartbeats waited behind the rosters of the others.
    launcher.feed(Heard(RosterMessage(0, 0, (), CONFIG), launcher.now))
    launcher.wait(3.0)
    assert not launcher.redials()
    launcher.wait(2.4)
    assert isinstance(launcher.done[-1], Redial)


def test_who_joins_and_hears_nothing_for_the_whole_timeout_calls_again() -> None:
    launcher = Launcher()
    launcher.wait(12.5)
    assert isinstance(launcher.done[-1], Redial)


def test_who_reaches_no_coordinator_ends_within_the_timeout() -> None:
    launcher = running()
    launcher.wait(7.5)
    launcher.feed(Said(Stopped(0, None), launcher.now))
    launcher.wait(2.6)
    assert launcher.end().startswith("fleetrun was cut off from the coordinator (")


def test_a_coordinator_that_is_lost_hides_no_failure_of_this_hosts_ranks() -> None:
    launcher = running()
    now = launcher.now
    launcher.feed(Said(Failed(0, OWN), now), Disconnected(now), Said(Stopped(0, OWN), now))
    launcher.wait(5.0)
    (verdict,) = launcher.delivered(Verdict)
    assert (verdict.failure, verdict.launcher) == (OWN, "me")
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
    launcher = running(CONFIG._replace(has_store=True, max_restarts=max_restarts))
    if own is not None:
        launcher.feed(Said(Failed(0, own), launcher.now))
    launcher.feed(Disconnected(launcher.now))
    launcher.wait(5.0)
    launcher.feed(Said(Stopped(0, own), launcher.now))
    launcher.wait(5.0)
    (verdict,) = launcher.delivered(Verdict)
    assert (verdict.is_final, verdict.given_up) == (is_final, given_up)


def test_what_cannot_be_planned_has_stopped_and_words_about_another_generation_are_dropped() -> (
    None
):
    launcher = Launcher()
    launcher.feed(Heard(RosterMessage(1, 0, (), CONFIG), launcher.now))
    launcher.done.clear()
    launcher.feed(Said(HostReady(0), launcher.now))
    assert launcher.sent(object) == []
    launcher.feed(Said(Stopped(1, OWN), launcher.now))
    assert launcher.sent(object) == [Stopped(1, OWN)]


def test_a_launcher_that_was_stopped_says_so_and_kills_its_ranks() -> None:
    launcher = suspended()
    # The connection was closed meanwhile; sockets are looked at before the clock.
    launcher.feed(Disconnected(launcher.now), TimerExpired(launcher.now))
    assert "was not running for 43 s" in launcher.why()
    assert "cut off" not in launcher.why()
    assert any(isinstance(action, Fence) for action in launcher.done)


def test_one_that_was_stopped_before_its_ranks_start_does_not_start_them() -> None:
    launcher = Launcher()
    launcher.feed(Heard(RosterMessage(0, 0, (ENTRY, OTHER), CONFIG), launcher.now))
    launcher.feed(Said(HostReady(0), launcher.now))
    # The others run without it by now, and its connection still has what came before.
    launcher.now += CONFIG.heartbeat_timeout_s
    launcher.feed(Heard(Start(0), launcher.now))
    assert launcher.delivered(Start) == []
    assert launcher.state.phase != member.RUNNING


def test_one_that_is_refused_because_it_was_stopped_says_so() -> None:
    launcher = suspended()
    now = launcher.now
    launcher.feed(Disconnected(now), Connected(now + 0.01))
    launcher.feed(Heard(Refused("it counts as lost"), now + 0.02))
    assert "was not running" in launcher.why()
    launcher.feed(
        Said(Stopped(0, None), now + 1.0), Disconnected(now + 1.1), TimerExpired(now + 1.2)
    )
    assert launcher.end()


def test_ranks_that_were_killed_while_it_was_stopped_have_not_failed_by_themselves() -> None:
    launcher = suspended(ELASTIC)
    now = launcher.now
    # The loop sees a process that has ended before it looks at the clock.
    launcher.feed(Said(Failed(0, KILLED), now), Disconnected(now))
    launcher.feed(Said(Stopped(0, KILLED), now + 0.1), TimerExpired(now + 5.0))
    assert "was not running" in launcher.why()
    assert "was not running" in launcher.end()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_coordinator_that_was_stopped_says_so_and_not_how_its_ranks_have_ended(
    order: tuple[int, ...],
) -> None:
    launcher = running(is_local=True)
    now = launcher.state.wake_at + 45.0
    victim = Failure("node-1", "this host was cut off", 1, is_victim=True)
    events = (Said(Failed(0, KILLED), now), TimerExpired(now), Heard(Stop(0, victim), now))
    launcher.feed(*(events[i] for i in order), Said(Stopped(0, KILLED), now + 1.0))
    (stopped,) = launcher.sent(Stopped)
    assert stopped.failure is not None
    assert "was not running for 45 s" in stopped.failure.what


@pytest.mark.parametrize("restarts", [0, 1])
def test_each_answer_puts_off_the_death_of_the_ranks(restarts: int) -> None:
    config = CONFIG._replace(max_restarts=restarts)
    launcher = running(config)
    launcher.beat()
    last = launcher.kills()[-1]
    assert last is not None
    assert launcher.now + config.fence_s < last < launcher.now + config.quarantine_s


def test_a_coordinator_that_runs_puts_off_the_death_of_its_ranks_too() -> None:
    launcher = running(is_local=True)
    for _ in range(20):
        now = launcher.state.wake_at
        launcher.feed(TimerExpired(now))
        last = launcher.kills()[-1]
        assert last is not None
        assert now + CONFIG.fence_s < last < now + CONFIG.heartbeat_timeout_s


def test_nobody_else_misses_a_coordinator_whose_ranks_are_all_that_there_are() -> None:
    launcher = running(entries=(ENTRY,), is_local=True)
    launcher.feed(TimerExpired(launcher.state.wake_at))
    assert {*launcher.kills()} == {None}


def test_a_coordinator_that_may_be_replaced_leaves_that_to_its_lease() -> None:
    assert not running(RendezvousConfig(1, 2, has_store=True), is_local=True).kills()


def test_the_ranks_have_a_last_moment_from_their_start_on() -> None:
    assert running(ELASTIC).kills()


def test_one_that_runs_but_hears_nothing_was_cut_off() -> None:
    launcher = running()
    launcher.beat()
    launcher.wait(20.0)
    assert "cut off from the coordinator (10.0.0.1" in launcher.why()


def test_one_that_is_answered_late_does_not_end_a_job_that_can_do_without_it() -> None:
    launcher = running(ELASTIC)
    launcher.beat()
    launcher.feed(TimerExpired(launcher.now + 7.5))
    (failed,) = launcher.sent(Failed)
    assert failed.failure.is_departure
