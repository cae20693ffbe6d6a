"""The coordinator of a session, step by step: who may take part, and who is to blame."""

from __future__ import annotations

from typing import TypeVar

import pytest

from fleetrun.run.events import Failure, TimerExpired
from fleetrun.session import coordinator, state
from fleetrun.session.admission import DIGEST
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.driver import CODEC
from fleetrun.session.jobrecord import RosterEntry
from fleetrun.session.messages import (
    PROTOCOL,
    Acknowledged,
    Done,
    Failed,
    FromCoordinator,
    FromMember,
    Heartbeat,
    HostReady,
    Join,
    JoinRequest,
    LauncherKilled,
    Leave,
    Missing,
    Redialing,
    Refused,
    RosterMessage,
    Start,
    Stop,
    Stopped,
    Verdict,
)
from fleetrun.session.state import Broken, Received, Send

_Told = TypeVar("_Told", bound=FromCoordinator)


class Session:
    """A coordinator, and its messages to each connection; the first is its own launcher's."""

    def __init__(
        self,
        hosts: int,
        *,
        restarts: int = 0,
        least: int = 0,
        names: tuple[str, ...] = (),
        spares: int = 0,
    ) -> None:
        config = RendezvousConfig(
            least or hosts,
            hosts,
            names,
            max_restarts=restarts,
            spares=spares,
            rdzv_timeout_s=60.0,
            addresses=tuple((name,) for name in names),
        )
        self.now = 100.0
        self.state = state.begin(config, self.now)
        self.sent: dict[int, list[FromCoordinator]] = {}

    def feed(self, event: state.Event) -> None:
        """Take an event and keep the messages that are sent."""
        self.state, actions = coordinator.step(self.state, event)
        for action in actions:
            if isinstance(action, Send):
                for connection in action.connections:
                    self.sent.setdefault(connection, []).append(action.message)

    def say(self, number: int, message: FromMember) -> None:
        """Let the launcher at connection NUMBER send a message."""
        self.now += 0.001
        address = f"10.0.0.{number}"
        self.feed(Received(number, message, self.now, address, "10.0.0.1", is_local=number == 0))

    def join(
        self,
        number: int,
        *,
        name: str = "",
        rank: int | None = None,
        mode: str = "collective",
        script: str = "",
        trouble: str = "",
        failure: Failure | None = None,
    ) -> None:
        """Let a launcher join the generation."""
        settings = (("--run_mode", mode), *([(DIGEST, script)] if script else ()))
        offer = JoinRequest(
            "", f"node-{number}", 7, (7000,), ((),), rank, settings=settings, trouble=trouble
        )
        name = name or f"launcher {number}"
        join = Join(PROTOCOL, name, self.generation, offer, failure=failure)
        self.say(number, join)

    @property
    def generation(self) -> int:
        """The generation that forms or runs."""
        return self.state.generation

    def join_all(self, *numbers: int) -> None:
        """Let these hosts join."""
        for number in numbers:
            self.join(number)

    def ready(self, *numbers: int) -> None:
        """Let these hosts report that they are ready."""
        for number in numbers:
            self.say(number, HostReady(self.generation))

    def stopped(self, *numbers: int) -> None:
        """Let these hosts report that nothing runs there, and nothing failed there."""
        for number in numbers:
            self.say(number, Stopped(self.generation, None))

    def run(self, *numbers: int) -> None:
        """Let these hosts join and start."""
        self.join_all(*numbers)
        self.ready(*numbers)
        assert self.state.phase == state.RUNNING

    def run_short(self, *numbers: int) -> None:
        """Let fewer hosts than the job takes join and start."""
        self.join_all(*numbers)
        self.wait(31.0, *numbers)
        self.ready(*numbers)

    def wait(self, seconds: float, *alive: int) -> None:
        """Let time pass, while the hosts ALIVE send heartbeats."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1.0)
            for number in alive:
                self.say(number, Heartbeat(1))
            self.feed(TimerExpired(self.now))

    def last(self, number: int) -> FromCoordinator:
        """Return the last message to NUMBER, except answers to heartbeats."""
        told = [message for message in self.sent[number] if not isinstance(message, Acknowledged)]
        return told[-1]

    def told(self, number: int, kind: type[_Told]) -> _Told:
        """Return the last message to NUMBER, which is a KIND."""
        told = self.last(number)
        assert isinstance(told, kind)
        return told

    def verdict(self, number: int) -> Verdict:
        """Return the verdict that NUMBER was told."""
        return self.told(number, Verdict)

    def failure(self, number: int) -> Failure:
        """Return the failure in the verdict that NUMBER was told."""
        failure = self.verdict(number).failure
        assert failure is not None
        return failure


def failure(number: int, code: int = 7, *, is_victim: bool = False, no_retry: str = "") -> Failure:
    """Make the failure of a host's rank."""
    what = f"rank {number} exited with {code}"
    return Failure(f"node-{number}", what, code, is_victim=is_victim, no_retry=no_retry)


def test_the_roster_comes_when_all_are_there_the_master_first_the_rest_by_address() -> None:
    session = Session(3)
    session.join_all(12, 0, 2)
    roster = session.told(2, RosterMessage)
    assert [entry.host for entry in roster.entries] == ["10.0.0.1", "10.0.0.2", "10.0.0.12"]


def test_given_ranks_come_before_addresses() -> None:
    session = Session(3)
    session.join(0, rank=2)
    session.join(2)
    session.join(3, rank=0)
    roster = session.told(3, RosterMessage)
    assert [entry.hostname for entry in roster.entries] == ["node-3", "node-2", "node-0"]


def test_nobody_starts_before_all_are_ready() -> None:
    session = Session(2)
    session.join_all(0, 2)
    session.say(0, HostReady(0))
    assert isinstance(session.last(0), RosterMessage)
    session.say(2, HostReady(0))
    assert session.last(0) == session.last(2) == Start(0)


def test_success_is_told_when_all_are_done() -> None:
    session = Session(2)
    session.run(0, 2)
    session.say(2, Done(0))
    assert session.last(2) == Start(0)
    session.say(0, Done(0))
    assert session.verdict(2).failure is None


def test_the_first_failure_stops_all_and_is_the_verdict_once_all_have_stopped() -> None:
    session = Session(2)
    session.run(0, 2)
    session.say(2, Failed(0, failure(2)))
    assert session.last(0) == Stop(0, failure(2))
    session.say(0, Failed(0, failure(0, 9)))
    session.say(0, Stopped(0, failure(0, 9)))
    assert isinstance(session.last(0), Stop)
    session.say(2, Stopped(0, failure(2)))
    assert session.verdict(0).failure == failure(2)
    assert session.verdict(0).is_final


def test_a_victim_that_was_faster_is_not_to_blame_in_any_generation() -> None:
    session = Session(2, restarts=1)
    for generation in range(2):
        session.run(0, 2)
        session.say(0, Failed(generation, failure(0)))
        session.say(2, Failed(generation, failure(2, 5)))
        # The reason of a rank's failure is read when the rank has ended.
        session.say(0, Stopped(generation, failure(0, is_victim=True)))
        session.told(0, Stop)
        session.say(2, Stopped(generation, failure(2, 5)))
        assert session.verdict(0).launcher == "launcher 2"


def test_two_failures_of_one_attempt_count_once() -> None:
    session = Session(2, restarts=1)
    for _ in range(2):
        session.run(0, 2)
        for number in (0, 2):
            session.say(number, Failed(session.generation, failure(number)))
        for number in (0, 2):
            session.say(number, Stopped(session.generation, failure(number)))
    assert (session.verdict(2).generation, session.verdict(2).is_final) == (1, True)


def test_what_no_attempt_can_mend_is_not_tried_again() -> None:
    session = Session(2, restarts=3)
    session.run(0, 2)
    session.say(2, Failed(0, failure(2, no_retry="no such module")))
    session.stopped(0)
    session.say(2, Stopped(0, failure(2, no_retry="no such module")))
    assert (session.verdict(0).is_final, session.verdict(0).given_up) == (True, "no such module")


def test_a_connection_that_comes_back_is_told_what_it_has_missed() -> None:
    session = Session(2)
    session.run(0, 2)
    session.feed(Broken(2, session.now))
    session.say(0, Failed(0, failure(0)))
    session.join(5, name="launcher 2")
    assert [type(message) for message in session.sent[5]] == [RosterMessage, Stop]
    session.stopped(5)
    session.say(0, Stopped(0, failure(0)))
    assert session.verdict(5).failure == failure(0)


def test_a_host_that_falls_silent_is_lost_within_the_timeout_and_named() -> None:
    session = Session(2)
    session.run(0, 2)
    session.wait(10.0, 0)
    stop = session.told(0, Stop)
    assert stop.failure.host == "10.0.0.2 (node-2)"


def test_a_rank_that_failed_before_a_silent_host_counted_as_lost_is_to_blame() -> None:
    session = Session(3)
    session.run(0, 2, 3)
    session.wait(8.0, 0, 2)
    session.say(2, Failed(0, failure(2)))
    session.stopped(0)
    session.say(2, Stopped(0, failure(2)))
    session.wait(3.0, 0, 2)
    assert session.verdict(0).failure == failure(2)


def test_a_launcher_that_makes_another_connection_is_not_lost_with_the_first() -> None:
    session = Session(3)
    session.run(0, 2, 3)
    session.say(3, Redialing(0))
    session.feed(Broken(3, session.now))
    session.say(2, Failed(0, failure(2)))
    session.stopped(0)
    session.say(2, Stopped(0, failure(2)))
    session.wait(6.0, 0, 2)
    assert session.state.phase == state.STOPPING
    session.wait(4.0, 0, 2)
    assert session.verdict(2).failure == failure(2)


def test_a_host_that_was_lost_while_the_job_ends_comes_back_and_is_told_how() -> None:
    session = Session(3)
    session.run(0, 2, 3)
    session.say(2, Failed(0, failure(2)))
    session.wait(10.0, 0, 2)
    assert "launcher 3" in session.state.lost
    session.join(5, name="launcher 3")
    assert isinstance(session.last(5), Stop)
    session.stopped(0)
    session.say(2, Stopped(0, failure(2)))
    assert session.state.phase == state.STOPPING
    session.stopped(5)
    assert session.verdict(5).failure == session.verdict(0).failure == failure(2)


def test_three_seconds_without_a_word_are_no_loss() -> None:
    session = Session(2)
    session.run(0, 2)
    session.wait(3.0, 0)
    session.wait(20.0, 0, 2)
    assert session.state.phase == state.RUNNING


def test_a_lost_launcher_never_comes_back() -> None:
    session = Session(3, restarts=3, least=2)
    session.run(0, 2, 3)
    session.wait(10.0, 0, 3)
    session.join(6, name="launcher 2")
    assert isinstance(session.last(6), Refused)


def test_a_generation_waits_until_who_is_cut_off_has_ended_its_ranks() -> None:
    session = Session(3, least=2)
    session.run(0, 2, 3)
    session.feed(Broken(2, session.now))
    lost_at = session.now
    session.wait(5.0, 0, 3)
    session.stopped(0, 3)
    session.join_all(0, 3)
    assert session.state.phase == state.FORMING
    session.wait(6.0, 0, 3)
    assert session.now > lost_at + 10.0
    roster = session.state.roster
    assert roster is not None
    assert ([entry.hostname for entry in roster.entries], roster.restarts) == (
        ["node-0", "node-3"],
        0,
    )


def test_an_elastic_job_begins_with_fewer_once_nobody_else_comes() -> None:
    session = Session(3, least=2)
    session.join_all(0, 2)
    session.wait(29.0, 0, 2)
    assert session.state.phase == state.FORMING
    assert session.state.told.startswith("up to 1 more host")
    session.wait(2.0, 0, 2)
    assert len(session.state.placed) == 2


def test_a_wait_is_limited_by_the_timeout_that_counts() -> None:
    session = Session(4, least=2)
    session.join(0)
    first = session.told(0, Missing)
    assert (first.limit, round(first.left_s)) == ("--rdzv_timeout", 60)
    session.wait(20.0, 0)
    session.join(1)
    second = session.told(1, Missing)
    assert (second.limit, round(second.left_s)) == ("--elastic_timeout", 30)
    session.wait(15.0, 0, 1)
    session.join(2)
    # There are no 30 s more: all of them together have --rdzv_timeout.
    third = session.told(2, Missing)
    assert (third.limit, round(third.left_s)) == ("--elastic_timeout", 25)


def test_lost_hosts_are_waited_for_as_long_as_they_may_train() -> None:
    session = Session(3, least=2)
    session.run(0, 1, 2)
    session.wait(9.5, 0, 1)
    session.stopped(0, 1)
    session.join_all(0, 1)
    session.wait(0.2, 0, 1)
    missing = session.told(1, Missing)
    assert missing.who.startswith("up to 1 more host")
    assert missing.limit == "--heartbeat_timeout"
    assert missing.left_s <= 2.0


def test_a_wait_that_is_limited_otherwise_is_told_again() -> None:
    session = Session(2, spares=1)
    session.run(0, 1)
    session.join(2)
    session.feed(Broken(1, session.now))
    session.feed(Broken(2, session.now))
    session.wait(6.0, 0)
    session.stopped(0)
    session.join(0)
    told = []
    while session.state.phase == state.FORMING:
        told.append(session.told(0, Missing))
        session.wait(1.0, 0)
    # As long as the spare that was lost, too, counts as being there; and then for others to come.
    limits = [missing.limit for missing in told]
    assert [*dict.fromkeys(limits)] == ["--rdzv_timeout", "--elastic_timeout"]
    assert len({missing.who for missing in told}) == 1


def test_too_few_that_are_left_wait_as_long_as_for_one_more() -> None:
    session = Session(3, least=2)
    session.run_short(0, 1)
    session.wait(15.0, 0)
    session.stopped(0)
    session.join(0)
    session.wait(2.0, 0)
    missing = session.told(0, Missing)
    assert missing.who.startswith("1 host of 2")
    assert missing.limit == "--elastic_timeout"
    assert 25.0 < missing.left_s <= 30.0


def test_more_hosts_are_waited_for_once_all_survivors_are_back() -> None:
    session = Session(4, least=3)
    session.run(0, 1, 2, 3)
    for number in (2, 3):
        session.feed(Broken(number, session.now))
    session.wait(5.0, 0, 1)
    session.stopped(0, 1)
    session.join(0)
    session.wait(20.0, 0, 1)
    session.join(1)
    session.wait(29.0, 0, 1)
    assert session.state.phase == state.FORMING
    session.wait(2.0, 0, 1)
    assert "did not come within 30 s" in session.failure(1).what


def test_a_newcomer_stands_by_and_makes_an_elastic_job_start_again_with_it() -> None:
    session = Session(3, least=2)
    session.run_short(0, 2)
    session.join(5)
    told = session.told(5, Missing)
    assert told.stands_by
    session.wait(29.0, 0, 2, 5)
    assert session.state.phase == state.RUNNING
    session.wait(2.0, 0, 2, 5)
    stop = session.told(0, Stop)
    assert (stop.failure.host, stop.failure.is_departure) == ("10.0.0.5 (node-5)", True)
    session.stopped(0, 2)
    session.join_all(0, 2)
    roster = session.told(5, RosterMessage)
    assert [entry.hostname for entry in roster.entries] == ["node-0", "node-2", "node-5"]
    assert (roster.generation, roster.restarts) == (1, 0)


def test_a_job_that_is_done_in_part_is_not_begun_again_for_a_newcomer() -> None:
    session = Session(3, least=2)
    session.run_short(0, 2)
    session.say(2, Done(0))
    session.join(5)
    session.wait(60.0, 0, 2, 5)
    assert session.state.phase == state.RUNNING
    session.say(0, Done(0))
    assert session.verdict(5) == session.verdict(0)


def test_a_host_that_departs_is_not_waited_for() -> None:
    session = Session(3, least=2)
    session.run(0, 2, 3)
    asked = Failure("node-3", "interrupted by SIGTERM", 143, is_departure=True)
    session.say(3, Failed(0, asked))
    session.stopped(0, 2)
    session.say(3, Stopped(0, asked))
    assert not session.verdict(0).is_final
    session.join_all(0, 2)
    session.say(3, Leave(asked))
    roster = session.told(2, RosterMessage)
    assert [entry.hostname for entry in roster.entries] == ["node-0", "node-2"]


def test_one_host_more_than_wanted_is_refused() -> None:
    session = Session(2)
    session.run(0, 2)
    session.join(3)
    refused = session.told(3, Refused)
    assert "all hosts of the job are there" in refused.why
    assert session.state.phase == state.RUNNING


def test_who_is_configured_otherwise_is_refused_and_named_to_the_others() -> None:
    session = Session(2)
    session.join(0)
    session.join(2, mode="rpc")
    refused = session.told(2, Refused)
    assert refused.why == "--run_mode is rpc there and collective on node-0"
    session.wait(2.0, 0)
    missing = session.told(0, Missing)
    assert "10.0.0.2 (node-2) cannot take part" in missing.remarks[0]


def test_what_is_told_of_hosts_that_differ_is_never_too_long_to_be_read() -> None:
    session = Session(3)
    session.join(0, mode="x" * 60_000 + "a")
    session.join(1, mode="x" * 60_000 + "a")
    for number in range(2, 20):
        session.join(number, mode=f"{number}" + "x" * 60_000)
    session.join(20, mode="x" * 60_000 + "b")
    refused = session.told(20, Refused)
    assert "xb there and ..." in refused.why
    session.wait(61.0, 0, 1)
    assert session.verdict(1).failure is not None
    for messages in session.sent.values():
        for message in messages:
            assert CODEC.read(CODEC.write(message)) == message


def test_two_hosts_of_one_rank_end_the_job_for_all() -> None:
    session = Session(3)
    session.join(0)
    session.join(2, rank=1)
    session.join(3, rank=1)
    for number in (0, 2, 3):
        blamed = session.failure(number)
        assert blamed.exit_code == 4
        assert "node-2" in blamed.what
        assert "node-3" in blamed.what


def test_a_newcomer_of_a_taken_rank_does_not_end_a_job_that_starts_again() -> None:
    session = Session(3, least=2)
    session.join(0)
    session.join(2, rank=1)
    session.wait(31.0, 0, 2)
    session.ready(0, 2)
    session.say(0, Failed(0, Failure("node-0", "asked", 101, is_departure=True)))
    session.stopped(0, 2)
    session.join(3, rank=1)
    refused = session.told(3, Refused)
    assert "the same rank as 10.0.0.2 (node-2), pid 7: 1" in refused.why
    assert session.state.phase == state.FORMING


def test_a_listed_host_that_is_configured_otherwise_ends_the_job_at_once() -> None:
    session = Session(3, names=("10.0.0.0", "10.0.0.2", "10.0.0.3"))
    session.join(0, rank=0)
    session.join(2, rank=1)
    session.join(3, rank=2, mode="rpc")
    for number in (0, 2):
        told = session.failure(number)
        assert told.exit_code == 4
        assert "10.0.0.3 (node-3) cannot take part: --run_mode is rpc there" in told.what


def test_a_misfit_from_elsewhere_or_beside_a_host_that_is_there_ends_nothing() -> None:
    session = Session(3, names=("10.0.0.0", "10.0.0.2", "10.0.0.3"))
    session.join(0, rank=0)
    session.join(2, rank=1)
    session.join(9, rank=2, mode="rpc")
    session.join(2, name="a second one on node-2", rank=2, mode="rpc")
    assert session.state.phase == state.FORMING


def test_a_misfit_with_the_script_of_the_job_ends_it_and_one_with_another_does_not() -> None:
    session = Session(3)
    session.join(0, script="0f")
    session.join(2, script="1e", mode="rpc")
    assert isinstance(session.last(2), Refused)
    assert session.state.phase == state.FORMING
    session.join(3, script="0f", mode="rpc")
    told = session.failure(0)
    assert told.exit_code == 4
    assert "10.0.0.3 (node-3) cannot take part: --run_mode is rpc there" in told.what


NO_SCRIPT = Failure("node-2", "there is no script train.py", 3)


@pytest.mark.parametrize("ill", [0, 2])
def test_a_host_that_brings_its_trouble_ends_the_job_for_all(ill: int) -> None:
    session = Session(3)
    session.join(1)
    session.join(ill, failure=NO_SCRIPT)
    for number in (1, ill):
        assert session.verdict(number).failure == NO_SCRIPT
        assert session.verdict(number).is_final
    assert len(session.state.heard_end) == 2
    # A later host hears it, too.
    session.join(3)
    assert session.verdict(3).failure == NO_SCRIPT
    assert len(session.state.heard_end) == 3


def test_an_elastic_job_goes_on_without_a_host_that_brings_its_trouble() -> None:
    session = Session(3, least=2)
    session.join_all(0, 1)
    session.join(2, failure=NO_SCRIPT)
    assert isinstance(session.last(2), Refused)
    session.wait(31.0, 0, 1)
    (roster,) = [message for message in session.sent[1] if isinstance(message, RosterMessage)]
    assert [entry.hostname for entry in roster.entries] == ["node-0", "node-1"]
    assert roster.remarks == ("10.0.0.2 (node-2) cannot take part: there is no script train.py",)


def test_a_host_that_can_no_longer_take_part_is_left_out_of_the_next_start() -> None:
    session = Session(3, least=2, restarts=1)
    session.run(0, 1, 2)
    failed(session, 1, 0, 2)
    session.join(0)
    session.join(1, failure=Failure("node-1", "port 6070 is taken", 3))
    session.join(2)
    assert hosts_of(session, 0) == ["node-0", "node-2"]


def test_one_more_host_with_trouble_than_the_job_has_places_ends_nothing() -> None:
    session = Session(2)
    session.run(0, 1)
    session.join(2, failure=NO_SCRIPT)
    assert isinstance(session.last(2), Refused)
    assert session.state.phase == state.RUNNING


def test_planning_has_a_time_of_its_own_after_the_last_host_came() -> None:
    session = Session(2)
    session.join(0)
    session.wait(59.5, 0)
    session.join(2)
    session.say(0, HostReady(0))
    session.wait(20.0, 0, 2)
    session.say(2, HostReady(0))
    assert session.last(2) == Start(0)


def test_who_is_refused_again_and_again_drives_out_but_its_own_lines() -> None:
    session = Session(3)
    session.join(0)
    session.join(2, mode="rpc")
    for number in range(100):
        session.join(9, name=f"stranger {number}", mode=f"mode {number}")
    lines = session.state.remarks
    assert lines[0].startswith("10.0.0.2 (node-2) cannot take part")
    assert len(lines) == 4


def test_a_launcher_that_was_started_again_takes_its_own_place() -> None:
    session = Session(3)
    session.join(0, rank=0)
    session.join(2, rank=1)
    session.feed(Broken(2, session.now))
    session.join(4, name="another", rank=1)
    assert set(session.state.hosts) == {"launcher 0", "another"}


def test_who_is_missing_is_named_when_time_is_up() -> None:
    session = Session(3)
    session.join_all(0, 2)
    session.wait(61.0, 0, 2)
    told = session.failure(2)
    assert told.exit_code == 4
    assert told.what.startswith("1 host of 3 (10.0.0.0 (node-0) and 10.0.0.2 (node-2) are here)")


def test_a_launcher_that_is_stopped_while_hosts_gather_ends_the_job() -> None:
    session = Session(3)
    session.join_all(0, 2)
    session.say(2, Leave(Failure("node-2", "interrupted", 143)))
    told = session.failure(0)
    assert told.exit_code == 143


def test_the_session_is_over_when_everybody_has_left() -> None:
    session = Session(2)
    session.run(0, 2)
    for number in (0, 2):
        session.say(number, Done(0))
    session.say(0, Leave(None))
    assert not session.state.is_over
    session.say(2, Leave(None))
    assert session.state.is_over


def test_an_elastic_job_goes_on_without_a_launcher_that_has_given_up() -> None:
    session = Session(3, least=2)
    session.run(0, 1, 2)
    session.say(1, Leave(None))
    session.stopped(0, 2)
    verdict = session.verdict(2)
    assert not verdict.is_final
    assert verdict.failure is not None
    assert verdict.failure.what == "fleetrun has ended"


def failed(session: Session, culprit: int, *others: int) -> None:
    """Let the generation fail because of CULPRIT, and all stop."""
    now = session.generation
    session.say(culprit, Failed(now, failure(culprit)))
    for number in (culprit, *others):
        session.say(number, Stopped(now, failure(culprit) if number == culprit else None))


def hosts_of(session: Session, number: int) -> list[str]:
    """Return the hosts of the roster that NUMBER was told last."""
    told = session.told(number, RosterMessage)
    return [entry.hostname for entry in told.entries]


def test_a_host_that_is_not_well_stays_out_while_another_can_take_its_place() -> None:
    session = Session(2, restarts=1, spares=1)
    session.run(0, 1)
    session.join(2)
    failed(session, 0, 1)
    session.join(1, trouble="the disk of its logs is full")
    session.join(0)
    assert hosts_of(session, 0) == hosts_of(session, 2) == ["node-0", "node-2"]
    missing = session.told(1, Missing)
    assert missing.stands_by
    assert missing.remarks == ("10.0.0.1 (node-1) stays out: the disk of its logs is full",)
    roster = session.told(2, RosterMessage)
    assert roster.remarks == missing.remarks


def test_an_elastic_job_goes_on_with_fewer_hosts_that_are_well_and_with_others_if_it_must() -> None:
    session = Session(3, restarts=1, least=2)
    session.run(0, 1, 2)
    failed(session, 0, 1, 2)
    for number in (1, 2, 0):
        session.join(number, trouble="" if number == 0 else f"trouble {number}")
    assert hosts_of(session, 0) == ["node-0", "node-2"]
    session.ready(0, 2)
    # The host that was left out is no newcomer for which all would start again.
    session.wait(120.0, 0, 1, 2)
    assert session.state.phase == state.RUNNING
    assert session.generation == 1


def test_a_host_of_which_the_job_has_failed_twice_makes_room_for_one_that_waits() -> None:
    session = Session(2, restarts=5, spares=1)
    session.run(0, 1)
    session.join(2)
    failed(session, 1, 0)
    session.run(0, 1)
    failed(session, 1, 0)
    session.join_all(1, 0)
    assert hosts_of(session, 0) == ["node-0", "node-2"]
    told = session.told(1, Missing)
    assert "failed 2 times because of it" in told.remarks[0]


def test_a_host_that_was_lost_twice_waits_behind_others_when_it_comes_back() -> None:
    session = Session(2, spares=2)
    session.run(0, 1)
    for name in ("back", "again"):
        session.feed(Broken(1, session.now))
        session.wait(10.0, 0, 2)
        session.stopped(0)
        session.join(1, name=name)
        session.join(0)
        for number in (0, 1):
            session.say(number, HostReady(session.generation))
    assert session.state.hosts["again"].failure_count == 2


def killed(session: Session, number: int, *, has_ranks: bool) -> None:
    """Let the guard of a launcher report over a new connection that it was killed."""
    message = LauncherKilled(f"launcher {number}", has_ranks)
    session.say(number + 100, message)


def test_a_launcher_whose_guard_says_that_it_was_killed_is_lost_at_once() -> None:
    session = Session(2)
    session.run(0, 1)
    session.feed(Broken(1, session.now))
    killed(session, 1, has_ranks=True)
    assert isinstance(session.last(0), Stop)
    session.stopped(0)
    told = session.failure(0)
    assert (told.what, told.host) == ("fleetrun was lost", "10.0.0.1 (node-1)")


def test_the_next_start_waits_for_the_end_of_a_killed_launchers_ranks_or_the_deadline() -> None:
    for tells in (True, False):
        session = Session(3, least=2)
        session.run(0, 1, 2)
        killed(session, 2, has_ranks=True)
        session.stopped(0, 1)
        session.join_all(0, 1)
        session.wait(5.0, 0, 1)
        assert session.state.phase == state.FORMING
        if tells:
            killed(session, 2, has_ranks=False)
        else:
            session.wait(6.0, 0, 1)
        # Until all are ready, they are told now and then which hosts are not.
        rosters = [message for message in session.sent[0] if isinstance(message, RosterMessage)]
        assert rosters[-1].generation == 1
        assert [entry.hostname for entry in rosters[-1].entries] == ["node-0", "node-1"]


@pytest.mark.extended
def test_five_hundred_hosts_that_join_at_once_make_one_roster() -> None:
    count = 512
    session = Session(count)
    session.run(*range(count))
    rosters = {
        message
        for sent in session.sent.values()
        for message in sent
        if isinstance(message, RosterMessage)
    }
    (roster,) = rosters
    assert len({entry.hostname for entry in roster.entries}) == count
    session.say(7, Failed(0, failure(7)))
    for number in range(count):
        assert not [message for message in session.sent[number] if isinstance(message, Verdict)]
        session.say(number, Stopped(0, failure(number, is_victim=number != 7)))
    assert {session.verdict(number).failure for number in range(count)} == {failure(7)}
    for number in range(count):
        session.say(number, Leave(None))
    assert session.state.is_over


def test_another_coordinator_knows_of_which_hosts_the_job_has_failed() -> None:
    session = Session(3, restarts=5, spares=1)
    session.run(0, 1, 2)
    failed(session, 1, 0, 2)
    session.run(0, 1, 2)
    assert session.state.roster is not None
    gone = {("10.0.0.9", "node-9"): 4}
    known = session.state._replace(failure_counts=gone)
    record = state.record(known, session.state.roster, "launcher 0")
    assert [entry.failure_count for entry in record.entries] == [0, 1, 0]
    assert record.others == (RosterEntry("", "10.0.0.9", "node-9", 4),)
    # The first host is lost; the third one coordinates the job now.
    next_one = state.resume(session.now, record, "launcher 2", session.now)
    assert next_one.generation == record.generation + 1
    assert next_one.hosts["launcher 1"].failure_count == 1
    assert next_one.failure_counts == {("10.0.0.9", "node-9"): 4, ("10.0.0.1", "node-0"): 1}


def test_a_launcher_of_another_job_of_the_name_gets_no_place_in_this_one() -> None:
    session = Session(2)
    session.state = session.state._replace(session="new")
    session.join(0)
    offer = JoinRequest("", "node-1", 7, (7000,), ((),), settings=(("--run_mode", "collective"),))
    session.say(1, Join(PROTOCOL, "of the old job", 0, offer, "old"))
    assert session.last(1) == Refused(
        "it belongs to another job of this name, whose coordinator was lost"
    )
    session.say(2, Join(PROTOCOL, "its successor", 0, offer))
    assert hosts_of(session, 0) == ["node-0", "node-1"]
    told = session.told(2, RosterMessage)
    assert told.session == "new"
    # It is not told how that job ended either.
    session.say(0, Stopped(0, failure(0)))
    session.stopped(2)
    assert session.verdict(2).is_final
    session.say(3, Join(PROTOCOL, "of the old job", 0, offer, "old"))
    assert isinstance(session.last(3), Refused)
