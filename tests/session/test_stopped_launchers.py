"""Launchers that are stopped (SIGSTOP, a suspended host) for longer than the others wait."""

from __future__ import annotations

import itertools

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
    Said,
    SendToCoordinator,
)
from fleetrun.session.messages import (
    Acknowledged,
    Entry,
    Failed,
    HostReady,
    JoinRequest,
    Refused,
    RosterMessage,
    Start,
    Stop,
    Stopped,
    Verdict,
)

CONFIG = RendezvousConfig(2, 2, heartbeat_timeout_s=10.0)


class Launcher:
    """A member whose ranks run, and all that it has done."""

    def __init__(
        self, config: RendezvousConfig = CONFIG, *, is_local: bool = False, is_alone: bool = False
    ) -> None:
        self.done: list[member.Action] = []
        self.state = member.begin(config, "me", "10.0.0.1", 0.0, is_local=is_local)
        offer = JoinRequest("", "node-2", 7, (7000,), ((),))
        entry = Entry("me", "10.0.0.2", "node-2", (7000,), ((),))
        other = entry._replace(launcher="first", host="10.0.0.1")
        roster = RosterMessage(0, 0, (entry,) if is_alone else (entry, other), config)
        for event in (
            Connected(0.1),
            JoinRequested(offer, 0.2),
            Heard(roster, 0.3),
            Said(HostReady(0), 0.4),
            Heard(Start(0), 0.5),
        ):
            self.feed(event)
        assert self.state.phase == member.RUNNING
        self.started = tuple(self.done)
        self.done.clear()

    def feed(self, event: member.Event) -> None:
        """Take an event and keep what is done."""
        self.state, actions = member.step(self.state, event)
        self.done += actions

    def beat(self, until: float) -> float:
        """Let time pass while every heartbeat is answered; return the last moment."""
        now = 0.5
        while self.state.wake_at < until:
            now = self.state.wake_at
            self.feed(TimerExpired(now))
            self.feed(Heard(Acknowledged(self.state.number), now + 0.01))
        return now

    def killed_at(self) -> float:
        """Return when its ranks are killed if it stops now."""
        *_, last = [action.at for action in self.done if isinstance(action, KillAt)]
        assert last is not None
        return last

    def delivered(self) -> list[object]:
        """Return what the launcher was to do."""
        return [one.message for one in self.done if isinstance(one, Deliver)]

    def why(self) -> str:
        """Return why the ranks are stopped."""
        (found,) = [one.failure.what for one in self.delivered() if isinstance(one, Stop)]
        return found


def test_a_launcher_that_was_stopped_says_so_and_kills_its_ranks() -> None:
    launcher = Launcher()
    now = launcher.beat(60.0) + 45.0
    # The connection was closed meanwhile; sockets are looked at before the clock.
    launcher.feed(Disconnected(now))
    launcher.feed(TimerExpired(now))
    assert "was not running for 43 s" in launcher.why()
    assert "cut off" not in launcher.why()
    assert any(isinstance(action, Fence) for action in launcher.done)


def test_one_that_is_refused_because_it_was_stopped_says_so() -> None:
    launcher = Launcher()
    now = launcher.beat(60.0) + 45.0
    launcher.feed(Disconnected(now))
    launcher.feed(Connected(now + 0.01))
    launcher.feed(Heard(Refused("it counts as lost"), now + 0.02))
    assert "was not running" in launcher.why()
    launcher.feed(Said(Stopped(0, None), now + 1.0))
    launcher.feed(Disconnected(now + 1.1))
    launcher.feed(TimerExpired(now + 1.2))
    (end,) = [told for told in launcher.delivered() if isinstance(told, Verdict)]
    assert end.failure is not None
    assert end.failure.host == "node-2"


@pytest.mark.parametrize("restarts", [0, 1])
def test_each_answer_puts_off_the_death_of_the_ranks(restarts: int) -> None:
    one = Launcher(RendezvousConfig(2, 2, heartbeat_timeout_s=10.0, max_restarts=restarts))
    now = one.beat(60.0)
    config, last = one.state.config, one.killed_at()
    assert now + config.fence_s < last < now + config.quarantine_s


def test_a_coordinator_that_runs_puts_off_the_death_of_its_ranks_too() -> None:
    launcher = Launcher(is_local=True)
    for _ in range(20):
        now = launcher.state.wake_at
        launcher.feed(TimerExpired(now))
        assert now + CONFIG.fence_s < launcher.killed_at() < now + CONFIG.heartbeat_timeout_s


KILLED = Failure("node-2", "rank 0 was killed by SIGKILL", 137)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_coordinator_that_was_stopped_says_so_and_not_how_its_ranks_have_ended(
    order: tuple[int, ...],
) -> None:
    launcher = Launcher(is_local=True)
    now = launcher.state.wake_at + 45.0
    victim = Failure("node-1", "this host was cut off", 1, is_victim=True)
    for i in order:
        launcher.feed(
            (Said(Failed(0, KILLED), now), TimerExpired(now), Heard(Stop(0, victim), now))[i]
        )
    launcher.feed(Said(Stopped(0, KILLED), now + 1.0))
    (end,) = [
        action.message.failure
        for action in launcher.done
        if isinstance(action, SendToCoordinator) and isinstance(action.message, Stopped)
    ]
    assert end is not None
    assert "was not running for 45 s" in end.what


def test_nobody_else_misses_a_coordinator_whose_ranks_are_all_that_there_are() -> None:
    one = Launcher(is_local=True, is_alone=True)
    one.feed(TimerExpired(one.state.wake_at))
    killed = [action.at for action in (*one.started, *one.done) if isinstance(action, KillAt)]
    assert {*killed} == {None}


def test_a_coordinator_that_may_be_replaced_leaves_that_to_its_lease() -> None:
    config = RendezvousConfig(1, 2, has_store=True)
    assert not [
        each for each in Launcher(config, is_local=True).started if isinstance(each, KillAt)
    ]


def test_the_ranks_have_a_last_moment_from_their_start_on() -> None:
    one = Launcher(RendezvousConfig(1, 2, heartbeat_timeout_s=10.0))
    assert any(isinstance(each, KillAt) for each in one.started)


def test_ranks_that_were_killed_while_it_was_stopped_have_not_failed_by_themselves() -> None:
    launcher = Launcher(RendezvousConfig(1, 2, heartbeat_timeout_s=10.0))
    now = launcher.beat(60.0) + 45.0
    # The loop sees a process that has ended before it looks at the clock.
    killed = Failure("node-2", "rank 1 was killed by SIGKILL", 137)
    launcher.feed(Said(Failed(0, killed), now))
    launcher.feed(Disconnected(now))
    launcher.feed(Said(Stopped(0, killed), now + 0.1))
    launcher.feed(TimerExpired(now + 5.0))
    assert "was not running" in launcher.why()
    (end,) = [told for told in launcher.delivered() if isinstance(told, Verdict)]
    assert end.failure is not None
    assert "was not running" in end.failure.what


def test_one_that_runs_but_hears_nothing_was_cut_off() -> None:
    launcher = Launcher()
    until = launcher.beat(60.0) + 20.0
    while launcher.state.phase == member.RUNNING and launcher.state.wake_at < until:
        launcher.feed(TimerExpired(launcher.state.wake_at))
    assert "cut off from the coordinator, 10.0.0.1" in launcher.why()


def test_one_that_is_answered_late_does_not_end_a_job_that_can_do_without_it() -> None:
    one = Launcher(RendezvousConfig(1, 2, heartbeat_timeout_s=10.0))
    one.feed(TimerExpired(one.beat(60.0) + 7.5))
    sent = [action.message for action in one.done if isinstance(action, SendToCoordinator)]
    said = sent[-2]
    assert isinstance(said, Failed)
    assert said.failure.is_departure
