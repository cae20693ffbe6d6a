"""Elections in a fake etcd that the test controls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fleetrun.errors import EnvironmentFault
from fleetrun.session import jobrecord
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.election import Election
from fleetrun.session.jobrecord import JobRecord, LeaderRecord, RosterEntry
from fleetrun.session.jobstore import StoreAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

FREE = ("", 0, "", 0, "10.0.0.1")
ENTRIES = (RosterEntry("old", "a", "a"), RosterEntry("me", "b", "b"))
RECORD = JobRecord("x", 3, 1, "old", ENTRIES, RendezvousConfig(1, 3, has_store=True))
OTHER = LeaderRecord("other", "10.0.0.2", 6166, "x", 4)


class Lab:
    """A fake store, loop and candidate of an election, and the calls that they got."""

    def __init__(self, config: RendezvousConfig) -> None:
        self.now = 100.0
        self.asked: list[tuple[Callable[[StoreAnswer], None], float, tuple[Any, ...]]] = []
        self.timers: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self.done: list[tuple[Any, ...]] = []
        self.can_lead = True
        self.fault = ""
        self.election = Election(config, "me", self, self, self, clock=lambda: self.now)  # type: ignore[arg-type]

    # The store and the loop.
    def ask(self, done: Callable[[StoreAnswer], None], *what: object) -> None:
        """Keep the request."""
        self.asked.append((done, self.now, what))

    def timer(self, key: Hashable, at: float | None, call: Callable[[], None]) -> None:
        """Keep a timer."""
        self.timers.pop(key, None)
        if at is not None:
            self.timers[key] = (at, call)

    def answer(self, value: object = None, trouble: str = "") -> tuple[Any, ...]:
        """Answer the first request, and return it."""
        done, at, what = self.asked.pop(0)
        done(StoreAnswer(at, value, trouble))
        return what

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and run the timers that are due."""
        until = self.now + seconds
        while due := [(at, key) for key, (at, _) in self.timers.items() if at <= until]:
            at, key = min(due, key=lambda timer: timer[0])
            self.now = max(self.now, at)
            self.timers.pop(key)[1]()
        self.now = until

    # The candidate.
    def may_lead(self) -> bool:
        """Return what the test has set."""
        return self.can_lead

    def listen(self, local: str) -> tuple[str, int]:
        """Pretend to listen, or fail."""
        if self.fault:
            raise EnvironmentFault(self.fault)
        self.done.append(("listen",))
        return local, 6166

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in {
            "unlisten",
            "unfollow",
            "lead",
            "follow",
            "resign",
            "renewed",
            "end",
            "note",
            "close",
        }:
            raise AttributeError(name)
        return lambda *values: self.done.append((name, *values))

    def did(self) -> list[tuple[Any, ...]]:
        """Return what the candidate was told since the last call."""
        done, self.done = self.done, []
        return done


@pytest.fixture
def lab() -> Lab:
    return Lab(RendezvousConfig(1, 3, heartbeat_timeout_s=10.0, has_store=True))


def become(lab: Lab) -> LeaderRecord:
    """Let the launcher be elected."""
    lab.election.seek()
    assert lab.answer(FREE) == ("look",)
    what, value, ttl_s, _ = lab.answer((7, 9))
    assert (what, ttl_s) == ("campaign", 10)
    leader = jobrecord.read_leader(value)
    assert leader is not None
    return leader


def test_who_finds_the_place_free_takes_it_and_renews_its_lease(lab: Lab) -> None:
    leader = become(lab)
    assert (leader.launcher, leader.host, leader.generation) == ("me", "10.0.0.1", 0)
    assert lab.did() == [("listen",), ("renewed", 100.0), ("lead", None, 100.0)]
    lab.pass_time(2.0)
    assert lab.answer(value=True) == ("renew", 7)
    assert lab.did() == [("renewed", 102.0)]


def test_who_comes_second_follows_until_the_place_is_free_and_goes_on_with_the_job(
    lab: Lab,
) -> None:
    lab.election.seek()
    lab.answer((jobrecord.write(OTHER), 5, "", 0, "10.0.0.1"))
    assert (lab.did(), lab.election.leader) == ([("follow",)], OTHER)
    lab.election.connected()
    lab.election.take_part()
    lab.pass_time(60.0)
    assert not lab.asked
    lab.can_lead = False
    lab.election.seek()
    free = ("", 0, jobrecord.write(RECORD), 8, "10.0.0.1")
    lab.answer(free)
    freed_at = lab.now
    assert lab.did() == [("unfollow",)]
    lab.can_lead = True
    lab.pass_time(1.0)
    lab.answer(free)
    what, value, *_ = lab.answer((7, 9))
    assert (what, jobrecord.read_leader(value)) == (
        "campaign",
        LeaderRecord("me", "10.0.0.1", 6166, "x", 4),
    )
    assert lab.did()[-1] == ("lead", RECORD, freed_at)


def test_who_is_slower_listens_no_more_and_looks_again(lab: Lab) -> None:
    lab.election.seek()
    lab.answer(FREE)
    lab.answer(None)
    assert lab.did() == [("listen",), ("unlisten",)]
    lab.pass_time(1.0)
    assert lab.asked


def test_a_coordinator_that_does_not_reach_etcd_resigns_before_its_lease_ends(lab: Lab) -> None:
    become(lab)
    lab.did()
    lab.pass_time(2.0)
    lab.answer(trouble="node-9:2379: no answer")
    lab.pass_time(4.9)
    assert lab.did() == []
    lab.pass_time(0.2)
    (action,) = lab.did()
    assert action[0] == "resign"
    assert "node-9:2379: no answer" in action[1]
    assert action[2] == 100.0
    # It does not follow its own key, which still exists.
    lab.asked.clear()
    lab.election.seek()
    lab.answer((jobrecord.write(LeaderRecord("me", "10.0.0.1", 6166, "y", 0)), 9, "", 0, ""))
    assert lab.did() == []


def test_whom_a_roster_is_refused_or_whose_lease_has_ended_resigns(lab: Lab) -> None:
    become(lab)
    lab.did()
    record = RECORD
    kept: list[int] = []
    lab.election.keep(record, lambda: kept.append(1))
    assert lab.answer(trouble="no answer")[:2] == ("keep", jobrecord.write(record))
    lab.pass_time(0.5)
    lab.answer(value=True)
    assert kept == [1]
    lab.election.keep(record, lambda: kept.append(2))
    lab.answer(value=False)
    assert kept == [1]
    assert lab.did()[0][:2] == ("resign", "another host has become the coordinator")
    become(lab)
    lab.did()
    lab.pass_time(2.0)
    lab.answer(value=False)
    assert lab.did()[0][:2] == ("resign", "etcd no longer accepts this coordinator")


def test_the_coordinator_of_a_job_that_never_starts_again_stays_without_etcd() -> None:
    lab = Lab(RendezvousConfig(2, 2, heartbeat_timeout_s=10.0, has_store=True))
    become(lab)
    record = RECORD
    lab.election.keep(record, lab.election.fix)
    # It ends with the coordinator.
    assert lab.answer(value=True)[3] == 7
    lab.did()
    lab.pass_time(2.0)
    lab.answer(value=False)
    lab.pass_time(60.0)
    assert [action[0] for action in lab.did()] == []


def test_what_another_job_of_the_name_has_left_is_waited_out(lab: Lab) -> None:
    lab.election.seek()
    left = ("", 0, jobrecord.write(RECORD), 8, "10.0.0.1")
    lab.answer(left)
    assert [action[0] for action in lab.did()] == ["note"]
    lab.pass_time(19.0)
    lab.answer(left)
    lab.did()
    lab.pass_time(2.0)
    lab.answer(left)
    lab.answer((7, 9))
    assert lab.did()[-1][:2] == ("lead", None)


def test_who_had_a_part_in_a_job_that_is_over_ends(lab: Lab) -> None:
    lab.election.seek()
    lab.answer((jobrecord.write(OTHER), 5, "", 0, ""))
    lab.election.connected()
    lab.election.take_part()
    lab.did()
    lab.election.seek()
    lab.answer(FREE)
    assert lab.did()[1:] == [
        (
            "end",
            (
                "how the job ended is not known here: it ended without this host, or etcd has lost "
                "its record"
            ),
        )
    ]
    lab.election.seek()
    lab.answer((jobrecord.write(OTHER._replace(job="y")), 5, "", 0, ""))
    assert lab.did() == [("end", "another job of the same name has begun")]


def test_a_host_that_cannot_listen_lets_another_one_coordinate(lab: Lab) -> None:
    lab.fault = "Each port from 6166 to 6169 is taken."
    lab.election.seek()
    with pytest.raises(EnvironmentFault):
        lab.answer(FREE)
    lab = Lab(RendezvousConfig(1, 3, has_store=True))
    lab.election.seek()
    lab.answer((jobrecord.write(OTHER), 5, "", 0, ""))
    lab.election.connected()
    lab.election.seek()
    lab.did()
    lab.fault = "Each port from 6166 to 6169 is taken."
    lab.answer(("", 0, jobrecord.write(RECORD), 8, ""))
    assert lab.did() == [("unfollow",), ("note", lab.fault)]


def test_who_leaves_tells_whether_the_job_is_over(lab: Lab) -> None:
    lab.election.leave(is_final=True)
    assert not lab.asked
    become(lab)
    lab.election.leave(is_final=False)
    assert lab.asked[-1][2] == ("leave", 9, 7, False)
    lab.election.seek()
    lab.election.close()
    assert not lab.timers


def test_who_reaches_too_few_gives_way_and_leads_again_where_nobody_else_does(lab: Lab) -> None:
    become(lab)
    lab.did()
    lab.election.give_way("it reaches too few")
    assert lab.answer(value=True) == ("leave", 9, 7, False)
    assert lab.did() == [("resign", "it reaches too few", 100.0)]
    lab.election.seek()
    for _ in range(8):
        assert lab.answer(FREE) == ("look",)
        lab.pass_time(1.0)
    lab.pass_time(2.5)
    lab.answer(FREE)
    assert lab.answer((8, 11))[0] == "campaign"
    lab.did()
    # That lasts as long as the job waits for more hosts.
    lab.pass_time(lab.election.config.elastic_timeout_s)
    lab.asked.clear()
    lab.did()
    lab.election.give_way("it reaches too few")
    assert not lab.asked
    assert lab.did() == []


def test_two_that_reach_too_few_do_not_give_way_to_each_other_for_ever(lab: Lab) -> None:
    become(lab)
    lab.election.give_way("it reaches too few")
    lab.answer(value=True)
    lab.election.seek()
    lab.answer((jobrecord.write(OTHER), 12, "", 0, "10.0.0.1"))
    lab.pass_time(lab.election.config.elastic_timeout_s)
    lab.answer(FREE)
    assert lab.answer((8, 14))[0] == "campaign"
    lab.asked.clear()
    lab.did()
    lab.election.give_way("it reaches too few")
    assert (lab.asked, lab.did()) == ([], [])


def test_who_gives_way_follows_whoever_leads_instead(lab: Lab) -> None:
    become(lab)
    lab.election.give_way("it reaches too few")
    lab.answer(value=True)
    lab.did()
    lab.election.seek()
    lab.answer((jobrecord.write(OTHER), 12, "", 0, "10.0.0.1"))
    assert lab.did() == [("follow",)]
    lab.pass_time(1.0)
    # That one is lost in turn, so this one leads.
    lab.answer(FREE)
    assert lab.answer((8, 14))[0] == "campaign"
