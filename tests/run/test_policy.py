"""The policy: by example, and by what holds in every history that can happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import generation

from fleetrun.model import ExitStatus, Rules
from fleetrun.run import policy
from fleetrun.run.events import (
    Action,
    Elapsed,
    Event,
    Examine,
    Examined,
    Exited,
    Failure,
    Finish,
    Gather,
    Gathered,
    GatherFailed,
    HostStopped,
    Interrupted,
    JobVerdict,
    Outcome,
    Refuted,
    SignalAll,
    SourceFailed,
    Spawn,
    Started,
    StopGathering,
    StopRequested,
    Sweep,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LONGEST_WAIT_S = policy.LONGEST_WAIT_S
TIMEOUT_S = 600.0
OK = ExitStatus(code=0)
INT, KILL, TERM, HUP, USR1 = 2, 9, 15, 1, 10


class Job:
    """A pretended supervisor: performs what the policy wants and keeps the books."""

    def __init__(
        self,
        essential: Sequence[bool],
        rules: Rules,
        spawns: Callable[[int], bool] | None = None,
        *,
        has_peers: bool = False,
        answers: bool = True,
    ) -> None:
        # What a generation consists of; the next one may be another. None: gathering takes longer.
        self.essential: Sequence[bool] | None = essential if answers else None
        self.has_peers = has_peers
        self.rules = rules
        self.now = 0.0
        self.spawns = spawns or (lambda _: True)
        self.state, actions = policy.begin(self.now, TIMEOUT_S)
        self.events: list[Event] = []
        self.done: list[Action] = []
        self.outcome: Outcome | None = None
        # What is found out about a process that failed; by default nothing more than its end.
        self.facts: dict[int, dict[str, Any]] = {}
        self.perform(actions)

    def perform(self, actions: Sequence[Action]) -> None:
        """Do what the policy wants, and what it wants then."""
        todo = list(actions)
        while todo:
            action = todo.pop(0)
            if not policy.is_current(self.state, action):
                continue
            self.done.append(action)
            match action:
                case Gather(attempt=attempt) if self.essential is not None:
                    plan = generation(self.essential, has_peers=self.has_peers)
                    todo += self.take(Gathered(attempt, plan, self.now))
                case StopGathering(attempt=attempt):
                    todo += self.take(GatherFailed(attempt, "nobody came.", 4, self.now))
                case Spawn(process=process, attempt=attempt):
                    todo += self.take(self.start(process, attempt))
                case Finish(outcome=outcome):
                    assert self.outcome is None, "finished twice"
                    self.outcome = outcome
                case Examine(exits=exits):
                    known = [one._replace(**self.facts.get(one.process, {})) for one in exits]
                    todo += self.take(Examined(tuple(known), self.now))
                case SignalAll() | Sweep() | HostStopped():
                    pass

    def start(self, process: int, attempt: int) -> Started | Exited:
        """Pretend to start a process."""
        label = f"rank {process}"
        if self.spawns(process):
            return Started(process, label, 100 + process, self.now, attempt)
        status = ExitStatus(code=127)
        return Exited(process, label, status, self.now, attempt=attempt, fault="no such program")

    def take(self, event: Event) -> tuple[Action, ...]:
        """Feed an event and return the actions, not performed yet."""
        self.events.append(event)
        self.state, actions = policy.step(self.state, event, self.rules)
        return actions

    def feed(self, event: Event) -> None:
        """Feed an event and perform what follows."""
        self.perform(self.take(event))

    def exit(
        self,
        process: int,
        code: int = 0,
        signum: int | None = None,
        *,
        no_retry: str = "",
        last_words: str = "",
        step: int | None = None,
        lived_s: float = 0.0,
        also_failed: frozenset[int] = frozenset(),
    ) -> None:
        """Let a process end."""
        status = ExitStatus(signum=signum) if signum else ExitStatus(code=code)
        exited = Exited(
            process,
            f"rank {process}",
            status,
            self.now,
            100 + process,
            self.state.attempt,
            no_retry=no_retry,
            last_words=last_words,
            step=step,
            lived_s=lived_s,
            also_failed=also_failed,
        )
        self.feed(exited)

    def interrupt(self, signum: int) -> None:
        """Let a signal come."""
        self.feed(Interrupted(signum, self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass, and the alarm ring."""
        self.now += seconds
        if self.state.deadline is not None and self.now >= self.state.deadline:
            self.feed(Elapsed(self.now))

    def signals(self) -> list[int]:
        """Return the signals that were sent to all."""
        return [action.signum for action in self.done if isinstance(action, SignalAll)]

    def verdict(self) -> Outcome:
        """Return the outcome, which there must be."""
        assert self.outcome is not None
        return self.outcome


def job(ranks: int = 3, **rules: float) -> Job:
    return Job([True] * ranks, Rules(**rules))  # type: ignore[arg-type]


def test_all_are_started_in_order() -> None:
    assert job(3).done == [Gather(0), Spawn(0, 0), Spawn(1, 0), Spawn(2, 0)]


def test_success_is_when_all_have_finished() -> None:
    one = job(2)
    one.exit(1)
    assert one.outcome is None
    one.exit(0)
    assert one.verdict().exit_code == 0
    assert one.verdict().describe() == "all processes finished"
    assert one.done[-2:] == [Sweep(), Finish(one.verdict())]


def test_first_failure_is_the_cause_and_stops_the_rest() -> None:
    one = job(3)
    one.exit(1, code=7)
    one.exit(0, signum=TERM)
    one.exit(2, code=9)
    assert one.verdict().exit_code == 7
    assert one.verdict().describe() == "rank 1 exited with 7"
    assert one.signals() == [TERM]
    assert [exited.process for exited in one.verdict().exits] == [1, 0, 2]


def test_who_raised_first_is_the_cause_although_it_ended_last() -> None:
    one = job(3)
    one.facts[0] = {"failed_at": 9.9, "is_victim": True}
    one.facts[1] = {"failed_at": 9.5}
    one.now = 10.0
    one.exit(0, code=1, also_failed=frozenset({1}))
    # The others are asked at once.
    assert one.done[-1] == SignalAll(TERM, frozenset({1}))
    one.exit(2, signum=TERM)
    one.now = 10.4
    one.exit(1, code=7)
    assert one.signals() == [TERM]
    assert one.verdict().describe() == "rank 1 exited with 7"


def test_who_only_says_what_victims_say_gives_way_to_who_failed_a_little_later() -> None:
    one = job(3)
    one.facts[0] = {"failed_at": 0.0, "is_victim": True}
    one.facts[1] = {"failed_at": 0.1}
    one.exit(0, code=1, also_failed=frozenset({1}))
    one.exit(1, code=7)
    one.exit(2, signum=TERM)
    assert one.verdict().exit_code == 7


def test_among_victims_only_the_first_is_the_cause() -> None:
    one = job(2)
    one.facts[0] = {"failed_at": 0.2, "is_victim": True}
    one.facts[1] = {"failed_at": 0.1, "is_victim": True}
    one.exit(0, code=1, also_failed=frozenset({1}))
    one.exit(1, code=3)
    assert one.verdict().exit_code == 3


def test_who_fails_when_asked_to_end_is_never_the_cause() -> None:
    one = job(2)
    one.facts[0] = {"is_victim": True}
    one.exit(0, code=1)
    one.exit(1, code=9)
    assert one.verdict().describe() == "rank 0 exited with 1"


def test_who_had_raised_but_ends_well_is_not_the_cause() -> None:
    one = job(2)
    one.exit(0, code=1, also_failed=frozenset({1}))
    one.exit(1)
    assert one.verdict().describe() == "rank 0 exited with 1"


def test_who_raised_gets_a_short_time_to_end_and_is_then_judged_by_its_exception() -> None:
    one = job(3, grace_s=10)
    one.facts[1] = {"failed_at": -0.5, "raised": 4}
    one.exit(0, code=1, also_failed=frozenset({1}))
    one.exit(2, signum=TERM)
    one.wait(policy.TEARDOWN_S)
    assert one.done[-1] == SignalAll(TERM)
    one.exit(1, signum=TERM)
    assert one.verdict().exit_code == 4
    assert [end.status for end in one.verdict().exits][-1] == ExitStatus(signum=TERM)


def test_who_raised_has_half_of_a_short_grace_and_is_killed_at_its_end() -> None:
    one = job(2, grace_s=2)
    one.facts[1] = {"failed_at": -0.5, "raised": 1}
    one.exit(0, code=3, also_failed=frozenset({1}))
    one.wait(1)
    one.wait(1)
    assert one.signals() == [TERM, TERM, KILL]
    one.exit(1, signum=KILL)
    assert one.verdict().exit_code == 1


def test_a_signal_that_ends_who_raised_by_chance_is_its_own() -> None:
    one = job(2)
    one.facts[1] = {"failed_at": -0.5, "raised": 1}
    one.exit(0, code=3, also_failed=frozenset({1}))
    one.exit(1, signum=KILL)
    assert one.verdict().exit_code == 137


def test_the_grace_is_whole_again_when_who_raised_has_ended() -> None:
    one = job(3, grace_s=10)
    one.exit(0, code=3, also_failed=frozenset({1}))
    one.exit(1, code=3)
    one.wait(9.9)
    assert one.signals() == [TERM]
    one.wait(0.1)
    assert one.signals() == [TERM, KILL]


def test_the_cause_is_found_although_somebody_is_stuck() -> None:
    one = job(3, grace_s=1)
    one.facts[1] = {"failed_at": -0.5}
    one.exit(0, code=3, also_failed=frozenset({1}))
    one.exit(1, code=5)
    one.wait(1)
    one.wait(policy.STUCK_S)
    assert (one.verdict().exit_code, one.verdict().stuck) == (5, (2,))


def test_restarts_go_by_the_cause_and_not_by_the_first_end() -> None:
    one = job(2, max_restarts=1)
    one.facts[1] = {"failed_at": -0.5, "no_retry": "no such module."}
    one.exit(0, code=1, also_failed=frozenset({1}))
    one.exit(1, code=5)
    assert (one.verdict().exit_code, one.verdict().given_up) == (5, "no such module.")


def test_death_by_signal_gives_128_and_the_signal() -> None:
    one = job(1)
    one.exit(0, signum=11)
    assert one.verdict().exit_code == 139
    assert one.verdict().describe() == "rank 0 was killed by SIGSEGV"


def test_who_does_not_stop_within_the_grace_is_killed() -> None:
    one = job(2, grace_s=3)
    one.exit(0, code=1)
    one.wait(2.9)
    assert one.signals() == [TERM]
    one.wait(0.1)
    assert one.signals() == [TERM, KILL]
    one.exit(1, signum=KILL)
    assert one.verdict().exit_code == 1


def test_what_even_sigkill_does_not_end_is_given_up_on() -> None:
    one = job(2, grace_s=1)
    one.exit(0, code=1)
    one.wait(1)
    one.wait(policy.STUCK_S)
    assert one.verdict().stuck == (1,)
    assert one.verdict().exit_code == 1


def test_an_early_alarm_changes_nothing() -> None:
    one = job(2)
    one.feed(Elapsed(0.0))
    one.exit(0, code=1)
    one.feed(Elapsed(0.5))
    assert one.signals() == [TERM]


@pytest.mark.parametrize("signum", [INT, TERM, HUP])
def test_a_signal_is_passed_on_once_and_is_the_verdict(signum: int) -> None:
    one = job(2)
    one.interrupt(signum)
    one.exit(0)
    one.exit(1)
    assert one.signals() == [signum]
    assert one.verdict().exit_code == 128 + signum
    assert one.verdict().describe().startswith("interrupted by SIG")


def test_the_second_signal_kills_at_once() -> None:
    one = job(2)
    one.interrupt(INT)
    one.now += 0.5
    one.interrupt(INT)
    assert one.signals() == [INT, KILL]
    one.now += 0.5
    one.interrupt(INT)
    assert one.signals() == [INT, KILL]


def test_the_same_signal_delivered_twice_is_one_request() -> None:
    one = job(2)
    one.interrupt(INT)
    one.now += 0.01
    one.interrupt(INT)
    assert one.signals() == [INT]
    one.interrupt(TERM)
    assert one.signals() == [INT, KILL]


def test_a_lost_terminal_says_so_more_than_once_and_is_never_in_a_hurry() -> None:
    one = job(2)
    one.interrupt(HUP)
    one.now += 1
    one.interrupt(HUP)
    assert one.signals() == [HUP]


def test_a_signal_to_everybody_is_not_a_second_request_after_a_rank_died_of_it() -> None:
    one = job(2, max_restarts=3)
    one.exit(0, signum=TERM)
    one.interrupt(TERM)
    assert one.signals() == [TERM]
    one.exit(1)
    assert one.verdict().exit_code == 143
    assert one.verdict().attempts == 1


def test_users_signals_are_passed_on_and_stop_nothing() -> None:
    one = job(1)
    one.interrupt(USR1)
    assert one.signals() == [USR1]
    assert one.state.interrupted is None
    one.exit(0)
    assert one.verdict().exit_code == 0


def test_who_is_not_essential_is_stopped_when_the_rest_is_done() -> None:
    one = Job([True, False], Rules())
    one.exit(0)
    assert one.signals() == [TERM]
    one.exit(1, signum=TERM)
    assert one.verdict().exit_code == 0


def test_who_is_not_essential_may_end_early_but_not_fail() -> None:
    one = Job([True, False, False], Rules())
    one.exit(1)
    assert one.signals() == []
    one.exit(2, code=3)
    assert one.signals() == [TERM]
    one.exit(0, signum=TERM)
    assert one.verdict().describe() == "rank 2 exited with 3"


def test_a_plan_without_processes_is_done_at_once() -> None:
    assert Job([], Rules()).verdict().exit_code == 0


def test_what_cannot_be_started_stops_what_was_and_is_not_tried_again() -> None:
    one = Job([True] * 3, Rules(max_restarts=2), spawns=lambda process: process != 1)
    assert [action for action in one.done if isinstance(action, Spawn)] == [
        Spawn(0, 0),
        Spawn(1, 0),
    ]
    assert one.signals() == [TERM]
    one.exit(0, signum=TERM)
    assert one.verdict().exit_code == 127
    assert one.verdict().describe() == "rank 1 could not be started: no such program"


def test_a_signal_overtakes_spawns_that_wait_their_turn() -> None:
    one = job(2)
    assert policy.is_current(one.state, Spawn(1, 0))
    one.take(Interrupted(TERM, 0.0))
    assert not policy.is_current(one.state, Spawn(1, 0))
    assert policy.is_current(one.state, SignalAll(TERM))


def test_restart_waits_until_all_are_dead() -> None:
    one = job(2, max_restarts=1)
    one.exit(0, code=5)
    assert Spawn(0, 1) not in one.done
    one.exit(1, signum=TERM)
    assert one.done[-1] == Sweep()
    one.wait(LONGEST_WAIT_S)
    assert one.done[-4:] == [Sweep(), Gather(1), Spawn(0, 1), Spawn(1, 1)]
    one.exit(0)
    one.exit(1)
    assert one.verdict().exit_code == 0
    assert one.verdict().attempts == 2
    assert [cause.describe() for cause in one.verdict().earlier] == ["rank 0 exited with 5"]


def test_restarts_are_counted() -> None:
    one = job(1, max_restarts=2)
    for code in (4, 5, 6):
        one.exit(0, code=code)
        one.wait(LONGEST_WAIT_S)
    assert one.verdict().exit_code == 6
    assert one.verdict().attempts == 3
    earlier = [cause.describe() for cause in one.verdict().earlier]
    assert earlier == ["rank 0 exited with 4", "rank 0 exited with 5"]


def test_s35_a_signal_ends_the_wait_for_another_attempt() -> None:
    one = job(1, max_restarts=2)
    one.exit(0, code=4)
    one.interrupt(TERM)
    assert one.verdict().exit_code == 143
    assert one.verdict().attempts == 2
    assert [cause.describe() for cause in one.verdict().earlier] == ["rank 0 exited with 4"]


def test_s54_a_hopeless_failure_is_not_tried_again() -> None:
    one = job(1, max_restarts=2)
    one.exit(0, code=1, no_retry="no such module.")
    assert one.verdict().exit_code == 1
    assert one.verdict().given_up == "no such module."


@pytest.mark.parametrize(
    ("steps", "lived_s", "attempts"),
    [
        ((None,) * 4, 1.0, 3),
        ((None,) * 4, 90.0, 4),
        ((7, 7, 7, 7), 90.0, 3),
        ((7, 9, 9, 9), 1.0, 4),
        ((7, 8, 9, 10), 1.0, 4),
    ],
)
def test_s53_three_failures_alike_without_a_new_step_are_enough(
    steps: tuple[int | None, ...], lived_s: float, attempts: int
) -> None:
    one = job(1, max_restarts=3)
    for step in steps:
        if one.outcome is None:
            one.exit(0, code=4, last_words="alas", step=step, lived_s=lived_s)
            one.wait(LONGEST_WAIT_S)
    assert one.verdict().attempts == attempts
    assert bool(one.verdict().given_up) == (attempts == 3)


def test_s53_failures_of_different_kinds_are_progress() -> None:
    one = job(1, max_restarts=3)
    for words in ("a", "b", "c", "d"):
        one.exit(0, code=4, last_words=words)
        one.wait(LONGEST_WAIT_S)
    assert one.verdict().attempts == 4


REFUTED = Refuted(("rank 0: nccl_comm_num has no effect",), 3.0)


def test_a_strategy_that_is_not_in_effect_stops_the_job_with_5() -> None:
    one = job(2, max_restarts=3)
    one.feed(REFUTED)
    assert one.signals() == [TERM]
    one.exit(0, signum=TERM)
    one.exit(1, code=1)
    assert (one.verdict().exit_code, one.verdict().attempts) == (5, 1)
    assert "nccl_comm_num has no effect" in one.verdict().describe()


def test_a_strategy_that_the_last_exit_refutes_is_the_verdict() -> None:
    one = job(1)
    one.take(Exited(0, "rank 0", OK, 2.0))
    actions = one.take(REFUTED)
    assert [action.outcome.cause for action in actions if isinstance(action, Finish)] == [REFUTED]
    assert one.take(REFUTED) == ()


def test_a_strategy_may_be_refuted_while_servers_are_asked_to_end() -> None:
    one = Job([True, False], Rules())
    one.exit(0)
    one.feed(REFUTED)
    one.exit(1, signum=TERM)
    assert one.verdict().exit_code == 5


@pytest.mark.parametrize("code", [0, 7])
def test_a_failure_is_worse_than_a_strategy_without_effect(code: int) -> None:
    one = job(2, max_restarts=1)
    one.exit(0, code=7)
    one.feed(REFUTED)
    one.exit(1, code=code)
    one.feed(REFUTED)
    one.wait(LONGEST_WAIT_S)
    one.exit(0)
    one.exit(1)
    assert one.verdict().exit_code == 0


def with_peers(trainers: int, servers: int = 0, restarts: int = 0) -> Job:
    """Make a host's part of a job: trainers, then servers."""
    essential = [True] * trainers + [False] * servers
    return Job(essential, Rules(max_restarts=restarts), has_peers=True)


ELSEWHERE = Failure("10.0.0.2", "server 1 exited with 7", 7)
DONE = JobVerdict(None, 1.0)


def test_servers_go_on_until_the_other_hosts_are_done() -> None:
    one = with_peers(1, servers=1)
    one.exit(0)
    assert one.signals() == []
    one.feed(DONE)
    assert one.signals() == [TERM]
    one.exit(1, signum=TERM)
    assert one.verdict().exit_code == 0


def test_the_other_hosts_may_be_done_first() -> None:
    one = with_peers(1)
    one.feed(DONE)
    assert one.outcome is None
    one.exit(0)
    assert one.verdict().cause is None


def test_a_failure_elsewhere_is_the_verdict() -> None:
    one = with_peers(1)
    one.feed(StopRequested(ELSEWHERE, 1.0))
    assert one.signals() == [TERM]
    one.exit(0, signum=TERM)
    assert one.done[-1] == HostStopped(0, ELSEWHERE, "")
    assert one.outcome is None
    told = ELSEWHERE._replace(words="Traceback")
    one.feed(JobVerdict(told, 1.0))
    assert (one.verdict().cause, one.verdict().exit_code) == (told, 7)


def test_what_failed_here_may_have_been_the_first_of_all_hosts() -> None:
    one = with_peers(2)
    one.exit(0, code=3)
    one.exit(1, signum=TERM)
    one.feed(JobVerdict(None, 1.0, is_here=True))
    assert one.verdict().exit_code == 3


def test_a_victim_here_is_not_the_cause_when_another_host_was_first() -> None:
    one = with_peers(1)
    one.exit(0, code=1)
    one.feed(JobVerdict(ELSEWHERE, 1.0))
    assert one.verdict().exit_code == 7


def test_who_is_cut_off_is_killed() -> None:
    one = with_peers(1)
    one.feed(StopRequested(ELSEWHERE, 1.0, is_fenced=True))
    assert one.signals() == [KILL]


def test_without_a_session_nothing_is_waited_for() -> None:
    one = with_peers(1)
    one.exit(0, code=3)
    assert one.outcome is None
    one.feed(LOST._replace(source=policy.SESSION))
    assert one.verdict().exit_code == 3
    assert "a bug" in one.verdict().given_up


def test_a_second_signal_does_not_wait_for_the_other_hosts() -> None:
    one = with_peers(1)
    one.interrupt(INT)
    one.exit(0, signum=INT)
    assert one.outcome is None
    one.now += 1.0
    one.interrupt(INT)
    assert one.verdict().exit_code == 130


def test_after_the_loss_of_a_host_the_others_do_not_wait_for_anything_to_heal() -> None:
    one = with_peers(1)
    one.exit(0)
    lost = Failure("10.0.0.2", "fleetrun was lost", 1, is_departure=True)
    one.feed(StopRequested(lost, 1.0))
    one.feed(JobVerdict(lost, one.now, is_final=False))
    one.wait(0.0)
    assert one.done[-1] == Spawn(0, 1)


def test_a_host_that_gave_up_hears_that_the_job_was_done_already() -> None:
    one = with_peers(1)
    one.exit(0)
    one.feed(StopRequested(ELSEWHERE, one.now))
    assert one.outcome is None
    one.feed(DONE)
    assert one.verdict().exit_code == 0


def test_it_hears_so_while_its_servers_are_being_stopped_too() -> None:
    one = with_peers(1, servers=1)
    one.exit(0)
    one.feed(StopRequested(ELSEWHERE, one.now))
    one.feed(DONE)
    one.exit(1, signum=TERM)
    assert one.verdict().exit_code == 0


def test_hosts_start_again_together() -> None:
    one = with_peers(1, restarts=1)
    one.exit(0)
    one.feed(StopRequested(ELSEWHERE, 1.0))
    one.feed(JobVerdict(ELSEWHERE, 1.0, is_final=False))
    one.wait(LONGEST_WAIT_S)
    assert one.state.attempt == 1
    # Word of the attempt that is over already.
    one.feed(StopRequested(ELSEWHERE, 1.0))
    one.feed(DONE)
    one.exit(0)
    assert one.outcome is None
    one.feed(DONE._replace(attempt=1))
    assert one.verdict().exit_code == 0


@pytest.mark.parametrize("is_waiting", [True, False])
def test_nobody_starts_again_without_the_others(*, is_waiting: bool) -> None:
    one = with_peers(2, restarts=3)
    one.exit(0, code=3)
    one.exit(1, signum=TERM)
    if is_waiting:
        one.feed(JobVerdict(None, 1.0, is_final=False, is_here=True))
        one.feed(JobVerdict(ELSEWHERE, 1.0))
    else:
        one.feed(JobVerdict(None, 1.0, given_up="no use", is_here=True))
    assert one.verdict().exit_code == (7 if is_waiting else 3)
    assert one.verdict().given_up == ("" if is_waiting else "no use")


def test_a_generation_may_have_another_number_of_processes() -> None:
    one = job(2, max_restarts=2)
    one.essential = [True, True, False]
    one.exit(0, code=5)
    one.exit(1, signum=TERM)
    one.wait(LONGEST_WAIT_S)
    assert one.done[-3:] == [Spawn(0, 1), Spawn(1, 1), Spawn(2, 1)]
    one.essential = [True]
    for process in range(3):
        one.exit(process, code=6)
    one.wait(LONGEST_WAIT_S)
    assert one.done[-1] == Spawn(0, 2)
    one.exit(0)
    assert (one.verdict().exit_code, one.verdict().attempts) == (0, 3)


def gathering(attempt: int, **rules: float) -> Job:
    """Make a job that gathers for ATTEMPT and gets no answer."""
    one = Job([True], Rules(max_restarts=3, **rules), answers=attempt > 0)
    if attempt:
        one.essential = None
        one.exit(0, code=5)
        one.wait(LONGEST_WAIT_S)
    assert (one.state.phase, one.done[-1]) == (policy.GATHERING, Gather(attempt))
    return one


@pytest.mark.parametrize("attempt", [0, 1])
def test_who_does_not_come_in_time_ends_the_job(attempt: int) -> None:
    one = gathering(attempt)
    one.wait(TIMEOUT_S - 1)
    assert one.outcome is None
    one.wait(1)
    assert (one.verdict().exit_code, one.verdict().attempts) == (4, attempt + 1)
    assert one.verdict().describe().endswith("nobody came")


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("signum", [INT, TERM, HUP])
def test_a_signal_ends_the_wait_for_hosts_at_once(attempt: int, signum: int) -> None:
    one = gathering(attempt)
    one.interrupt(USR1)
    assert one.outcome is None
    one.interrupt(signum)
    assert (one.verdict().exit_code, one.signals()) == (128 + signum, [])
    assert len(one.verdict().earlier) == attempt
    # The answer comes too late.
    assert one.take(Gathered(attempt, generation([True]), one.now)) == ()


def test_an_answer_for_another_attempt_is_none() -> None:
    one = gathering(1)
    assert one.take(Gathered(0, generation([True]), one.now)) == ()
    assert one.take(GatherFailed(0, "no.", 3, one.now)) == ()
    assert one.take(Gathered(1, generation([True]), one.now)) == (Spawn(0, 1),)
    # And only one counts.
    assert one.take(GatherFailed(1, "no.", 3, one.now)) == ()


def test_what_cannot_be_planned_again_ends_the_job() -> None:
    one = gathering(1)
    one.feed(GatherFailed(1, "Port 6070 is taken.", 3, one.now))
    assert one.verdict().exit_code == 3
    assert "could not be started again: Port 6070 is taken" in one.verdict().describe()


def test_other_hosts_may_fail_while_one_gathers() -> None:
    one = gathering(1)
    one.feed(JobVerdict(ELSEWHERE, one.now, attempt=0, is_final=False))
    assert one.outcome is None
    one.feed(JobVerdict(ELSEWHERE, one.now, attempt=0))
    assert one.verdict().exit_code == 7


def test_what_is_lost_while_hosts_are_waited_for_ends_the_job() -> None:
    one = gathering(1)
    one.feed(REFUTED)
    assert one.outcome is None
    one.feed(LOST)
    assert one.verdict().exit_code == 1


LOST = SourceFailed("the session", "a bug", "without word of the others", 3.0)


def test_a_job_that_cannot_be_watched_as_it_must_ends() -> None:
    one = job(2, max_restarts=3)
    one.feed(LOST)
    assert one.signals() == [TERM]
    one.exit(0, signum=TERM)
    one.exit(1, signum=TERM)
    assert (one.verdict().exit_code, one.verdict().attempts) == (1, 1)
    assert one.verdict().describe() == "the session failed (a bug)"


def test_a_job_goes_on_without_a_source_that_it_does_not_need() -> None:
    one = job(1)
    one.feed(LOST._replace(is_required=False))
    assert one.signals() == []
    one.exit(0)
    assert one.verdict().exit_code == 0


@pytest.mark.parametrize("is_waiting", [True, False])
def test_nothing_starts_again_that_cannot_be_watched_as_it_must(*, is_waiting: bool) -> None:
    one = job(2, max_restarts=3)
    one.exit(0, code=3)
    if is_waiting:
        one.exit(1, signum=TERM)
    one.feed(LOST)
    if not is_waiting:
        one.exit(1, signum=TERM)
    assert one.verdict().exit_code == (1 if is_waiting else 3)
    assert one.verdict().attempts == 1 + is_waiting


def test_what_fails_when_all_is_lost_anyway_explains_nothing() -> None:
    one = job(1)
    one.take(Exited(0, "rank 0", ExitStatus(code=3), 2.0))
    one.feed(LOST)
    assert one.state.given_up == ""


def test_a_source_that_fails_at_the_last_exit_has_the_last_word() -> None:
    one = job(1)
    one.take(Exited(0, "rank 0", OK, 2.0))
    actions = one.take(LOST)
    assert [action.outcome.cause for action in actions if isinstance(action, Finish)] == [LOST]


def test_after_the_end_nothing_happens() -> None:
    one = job(1)
    one.exit(0)
    for event in (Interrupted(INT, 1.0), Elapsed(2.0)):
        assert policy.step(one.state, event, one.rules) == (one.state, ())


# ------------------------------------------------------------------------------- every history


class Dice:
    """Chance, from numbers that hypothesis can make smaller."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def roll(self, sides: int) -> int:
        """Return a number below SIDES."""
        return self.numbers.pop(0) % sides if self.numbers else 0


def play(numbers: Sequence[int]) -> Job:
    """Let things happen as chance has it, and then let everybody who is left die."""
    dice = Dice(numbers)
    essential = [dice.roll(4) != 3 for _ in range(1 + dice.roll(4))]
    rules = Rules(grace_s=float(dice.roll(5)), max_restarts=dice.roll(3))
    has_peers = dice.roll(3) == 2
    one = Job(essential, rules, spawns=lambda _: dice.roll(20) != 19, has_peers=has_peers)
    while one.outcome is None:
        if dice.numbers:
            # The next generation may be another, or come late.
            one.essential = [dice.roll(4) != 3 for _ in range(1 + dice.roll(4))]
            if dice.roll(4) == 3:
                one.essential = None
            happen(one, dice)
        else:
            end(one)
    return one


def happen(one: Job, dice: Dice) -> None:
    """Let one thing happen."""
    alive = sorted(one.state.alive)
    match dice.roll(8):
        case 0 | 1 | 7 if one.state.phase == policy.GATHERING:
            come(one, dice)
        case 0 | 1 | 2 if alive:
            die(one, dice, code=(0, 0, 0, 7)[dice.roll(4)])
        case 3 if alive:
            die(one, dice, signum=(KILL, TERM, 11)[dice.roll(3)])
        case 4 if dice.roll(8) == 7:
            one.feed(LOST._replace(is_required=dice.roll(2) == 1))
        case 4:
            one.interrupt((INT, TERM, HUP, USR1)[dice.roll(4)])
        case 5 if dice.roll(4) == 3:
            one.feed(Refuted(("rank 0 left no evidence",), one.now))
        case 5:
            one.wait((0.01, 0.5, 2.0, 50.0)[dice.roll(4)])
        case 6 if one.has_peers and one.state.phase != policy.FINISHED:
            hear(one, dice)
        case _:
            one.now += 0.001


def come(one: Job, dice: Dice) -> None:
    """Let the answer to a Gather come."""
    attempt = max(0, one.state.attempt - (dice.roll(4) == 3))
    if dice.roll(6) == 5:
        one.feed(GatherFailed(attempt, "a port is taken.", 3, one.now))
    else:
        processes = [dice.roll(4) != 3 for _ in range(1 + dice.roll(4))]
        one.feed(Gathered(attempt, generation(processes, has_peers=one.has_peers), one.now))


def die(one: Job, dice: Dice, code: int = 0, signum: int | None = None) -> None:
    """Let somebody end; others may have failed before, and be slower."""
    alive = sorted(one.state.alive)
    process = alive.pop(dice.roll(len(alive)))
    also = frozenset(other for other in alive if dice.roll(3) == 2)
    if one.state.phase == policy.RUNNING:
        one.facts = {
            other: {
                "failed_at": one.now - dice.roll(5) / 10,
                "is_victim": dice.roll(2) == 1,
                "raised": (None, 1, 4)[dice.roll(3)],
            }
            for other in (process, *also)
        }
    one.exit(process, code=code, signum=signum, also_failed=also)


def hear(one: Job, dice: Dice) -> None:
    """Let another host tell something, of this attempt or of the one before."""
    attempt = max(0, one.state.attempt - dice.roll(2))
    if one.state.phase == policy.STOPPED:
        is_last = one.state.attempt >= one.rules.max_restarts
        is_here = isinstance(one.state.cause, Exited) and dice.roll(2) == 1
        failure = None if is_here else ELSEWHERE
        is_final = is_last or dice.roll(2) == 1
        one.feed(JobVerdict(failure, one.now, attempt, is_final, is_here=is_here))
    elif dice.roll(2):
        one.feed(DONE._replace(at=one.now, attempt=attempt))
    else:
        one.feed(StopRequested(ELSEWHERE, one.now, attempt, is_fenced=dice.roll(3) == 2))


def end(one: Job) -> None:
    """Let somebody who is left die."""
    alive = sorted(one.state.alive)
    if one.state.phase == policy.GATHERING:
        one.wait(TIMEOUT_S)
    elif alive:
        one.exit(alive[0], signum=KILL)
    elif one.state.phase == policy.STOPPED:
        one.feed(JobVerdict(None, one.now, one.state.attempt, is_here=True))
    else:
        assert policy.PEERS in one.state.unfinished, "nobody is left, and still no end"
        one.feed(DONE._replace(attempt=one.state.attempt))


def check(one: Job) -> None:
    """Print what must hold in every history."""
    outcome = one.verdict()
    assert [type(action) for action in one.done].count(Finish) == 1
    assert isinstance(one.done[-1], Finish)
    assert one.done[-2] == Sweep()
    stops = [e for e in one.events if isinstance(e, Interrupted) and e.signum != USR1]
    order = list(one.events)
    if stops:
        after = order[order.index(stops[0]) :]
        assert not any(isinstance(event, Started) for event in after), "started after a signal"
    assert 1 <= outcome.attempts <= one.rules.max_restarts + 1
    assert len(outcome.earlier) == outcome.attempts - 1
    check_last_attempt(one, stops)
    check_spawns(one)
    check_kills(one)


def check_last_attempt(one: Job, stops: list[Interrupted]) -> None:
    outcome = one.verdict()
    last = [
        event
        for event in one.events
        if isinstance(event, Exited) and event.attempt == outcome.attempts - 1
    ]
    assert list(outcome.exits) == last
    failures = [exited for exited in last if exited.status.exit_code]
    match outcome.cause:
        case None:
            assert outcome.exit_code == 0
            done = {exited.process for exited in last if not exited.status.exit_code}
            heard = any(
                isinstance(event, JobVerdict) and event.attempt == outcome.attempts - 1
                for event in one.events
            )
            assert one.state.essential <= done | ({policy.PEERS} if heard else set())
        case Interrupted():
            assert outcome.cause is stops[0]
            assert outcome.exit_code == 128 + stops[0].signum
            before = one.events[: one.events.index(stops[0])]
            assert not any(first in before for first in failures[:1])
        case Refuted():
            assert outcome.exit_code == 5
            assert outcome.cause in one.events
        case GatherFailed():
            assert outcome.exit_code in {3, 4}
            assert outcome.cause in one.events
            assert not last
        case SourceFailed():
            assert outcome.exit_code == 1
            assert outcome.cause.is_required
            assert outcome.cause in one.events
        case Failure():
            told = [e.failure for e in one.events if isinstance(e, JobVerdict | StopRequested)]
            assert outcome.cause in told
        case Exited():
            suspects = failures[0].also_failed | {failures[0].process}
            assert outcome.cause.process in suspects
            (end,) = [exited for exited in failures if exited.process == outcome.cause.process]
            given = {end.status.exit_code, outcome.cause.raised}
            assert outcome.exit_code in given - {None, 0}
            others = [
                exited._replace(**one.facts.get(exited.process, {}))
                for exited in failures
                if exited.process in suspects and not exited.fault
            ]
            assert all(
                (outcome.cause.is_victim, outcome.cause.failed_at)
                <= (each.is_victim, each.failed_at)
                for each in others
                if outcome.cause.failed_at is not None and each.failed_at is not None
            )


def check_spawns(one: Job) -> None:
    spawns = [action for action in one.done if isinstance(action, Spawn)]
    assert len(set(spawns)) == len(spawns)
    assert spawns == sorted(spawns, key=lambda spawn: (spawn.attempt, spawn.process))
    alive: set[int] = set()
    for event in one.events:
        if isinstance(event, Started):
            if event.process == 0:
                assert not alive, "born before all were dead"
            alive.add(event.process)
        elif isinstance(event, Exited):
            alive.discard(event.process)
    assert alive == set(one.verdict().stuck)
    for place, action in enumerate(one.done):
        if isinstance(action, Spawn) and action.attempt and action.process == 0:
            assert one.done[place - 2 : place] == [Sweep(), Gather(action.attempt)]


def check_kills(one: Job) -> None:
    polite = [signum for signum in one.signals() if signum not in {KILL, USR1}]
    kills = one.signals().count(KILL)
    attempts = one.verdict().attempts
    # Once to all, and once more to those that had raised already.
    assert len(polite) <= 2 * attempts
    assert kills <= len(polite)
    for place, event in enumerate(one.done):
        if isinstance(event, SignalAll) and event.signum != TERM:
            assert not event.spared, place


NUMBERS = st.lists(st.integers(0, 10_000), max_size=60)


@given(NUMBERS)
@examples(250)
def test_what_holds_in_hundreds_of_histories(numbers: list[int]) -> None:
    check(play(numbers))


@pytest.mark.slow
@pytest.mark.long
@given(NUMBERS)
@settings(max_examples=20_000, deadline=None)
def test_what_holds_in_twenty_thousand_histories(numbers: list[int]) -> None:
    check(play(numbers))
