"""The policy: examples, and properties of every possible history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from plans import generation

from fleetrun.model import ExitStatus, Rules
from fleetrun.run import policy
from fleetrun.run.events import (
    Action,
    Event,
    Examine,
    Exited,
    Failure,
    Gather,
    Gathered,
    GatherFailed,
    HostStopped,
    Interrupted,
    JobVerdict,
    Outcome,
    RootCauses,
    SignalAll,
    SourceFailed,
    Spawn,
    Started,
    StopRequested,
    StrategyRejected,
    Sweep,
    TimerExpired,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

INT, KILL, TERM, HUP, USR1 = 2, 9, 15, 1, 10


class Job:
    """A fake supervisor: performs the policy's actions and keeps account."""

    def __init__(
        self,
        essential: Sequence[bool],
        rules: Rules,
        spawns: Callable[[int], bool] | None = None,
        *,
        has_peers: bool = False,
        answers: bool = True,
    ) -> None:
        # The processes of a generation; the next one may differ. None: gathering takes longer.
        self.essential: Sequence[bool] | None = essential if answers else None
        self.has_peers = has_peers
        self.rules = rules
        self.now = 0.0
        self.spawns = spawns or (lambda _: True)
        self.state = policy.Policy()
        self.events: list[Event] = []
        self.done: list[Action] = []
        self.outcome: Outcome | None = None
        # The cause of a process's failure; by default nothing but its end.
        self.facts: dict[int, dict[str, Any]] = {}
        self.perform(self.state.begin())

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform the policy's actions, and those that follow."""
        todo = list(actions)
        while todo:
            action = todo.pop(0)
            if not self.state.is_current(action):
                continue
            self.done.append(action)
            match action:
                case Gather(attempt=attempt) if self.essential is not None:
                    plan = generation(self.essential, has_peers=self.has_peers)
                    plan = plan._replace(rules=self.rules)
                    todo += self.take(Gathered(attempt, plan, self.now))
                case Spawn(process=process, attempt=attempt):
                    todo += self.take(self.start(process, attempt))
                case Examine(exits=exits):
                    known = [
                        exited._replace(**self.facts.get(exited.process, {})) for exited in exits
                    ]
                    todo += self.take(RootCauses(tuple(known), self.now))
                case SignalAll() | Sweep() | HostStopped():
                    pass
        if self.state.phase == policy.FINISHED:
            self.outcome = self.state.outcome()

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
        return self.state.step(event)

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
        """Let time pass, and the timer expire."""
        self.now += seconds
        if self.state.deadline is not None and self.now >= self.state.deadline:
            self.feed(TimerExpired(self.now))

    def signals(self) -> list[int]:
        """Return the signals that were sent to all."""
        return [action.signum for action in self.done if isinstance(action, SignalAll)]

    def verdict(self) -> Outcome:
        """Return the outcome, which must exist."""
        assert self.outcome is not None
        return self.outcome


def a_job(ranks: int = 3, **rules: float) -> Job:
    return Job([True] * ranks, Rules(**rules))  # type: ignore[arg-type]


SIGNALS = {"INT": INT, "KILL": KILL, "TERM": TERM, "HUP": HUP, "USR1": USR1, "SEGV": 11}
ELSEWHERE = Failure("10.0.0.2", "server 1 exited with 7", 7)
DONE = JobVerdict(None, 1.0)
HERE = JobVerdict(None, 1.0, is_here=True)
STRATEGY_REJECTED = StrategyRejected(("rank 0: nccl_comm_num has no effect",), 3.0)
LOST = SourceFailed("the session", "a bug", 3.0)
EVENTS: dict[str, Event] = {
    "refuted": STRATEGY_REJECTED,
    "lost": LOST,
    "optional lost": LOST._replace(is_required=False),
    "session lost": LOST._replace(source=policy.SESSION),
    "done": DONE,
    "stop": StopRequested(ELSEWHERE, 1.0),
    "verdict": JobVerdict(ELSEWHERE, 1.0),
    "verdict here": HERE,
    "verdict here, no use": HERE._replace(given_up="no use"),
    "again": JobVerdict(ELSEWHERE, 1.0, is_final=False),
    "again here": HERE._replace(is_final=False),
    "done 1": DONE._replace(attempt=1),
}


def play_out(job: Job, history: str) -> None:
    """Play HISTORY, step by step.

    `1=7` is the exit of process 1, `1=TERM` its end by a signal, `1=7+0` an end when process 0 had
    failed, too; `!INT` a signal to the launcher, `3s` a time.
    Others are EVENTS.
    """
    for step in history.split("; "):
        process, is_exit, how = step.partition("=")
        if is_exit:
            how, _, also = how.partition("+")
            failed = frozenset(map(int, also.split(","))) if also else frozenset[int]()
            code = 0 if how in SIGNALS else int(how)
            job.exit(int(process), code, SIGNALS.get(how), also_failed=failed)
        elif step.startswith("!"):
            job.interrupt(SIGNALS[step[1:]])
        elif step in EVENTS:
            job.feed(EVENTS[step])
        else:
            job.wait(float(step.removesuffix("s")))


class Case(NamedTuple):
    """A history of processes (* waited for, - not), and its expected result."""

    says: str
    processes: str
    history: str
    # None: the job goes on.
    code: int | None
    # Sent to all.
    signals: str = ""
    describes: str = ""
    given_up: str = ""
    restarts: int = 0
    grace_s: float = 10.0
    facts: Mapping[int, dict[str, Any]] = {}
    earlier: tuple[str, ...] = ()
    stuck: tuple[int, ...] = ()
    has_peers: bool = False


CASES = (
    Case("success", "**", "1=0; 0=0", 0, describes="all processes finished"),
    Case("the first failure", "***", "1=7; 0=TERM; 2=9", 7, "TERM", "rank 1 exited with 7"),
    Case(
        "who raised first is the cause although it ended last",
        "***",
        "10s; 0=1+1; 2=TERM; 0.4s; 1=7",
        7,
        "TERM",
        "rank 1 exited with 7",
        facts={0: {"failed_at": 9.9, "is_victim": True}, 1: {"failed_at": 9.5}},
    ),
    Case(
        "a victim gives way to who failed a little later",
        "***",
        "0=1+1; 1=7; 2=TERM",
        7,
        "TERM",
        facts={0: {"failed_at": 0.0, "is_victim": True}, 1: {"failed_at": 0.1}},
    ),
    Case(
        "who fails when asked to end is never the cause",
        "**",
        "0=1; 1=9",
        1,
        "TERM",
        "rank 0 exited with 1",
        facts={0: {"is_victim": True}},
    ),
    Case(
        "who raised is judged by its exception, even if it is stopped",
        "***",
        "0=1+1; 2=TERM; 1=TERM",
        4,
        "TERM",
        facts={1: {"failed_at": -0.5, "raised": 4}},
    ),
    Case(
        "the cause is found although somebody is stuck",
        "***",
        f"0=3+1; 1=5; 1s; {policy.STUCK_S}s",
        5,
        "TERM KILL",
        grace_s=1.0,
        facts={1: {"failed_at": -0.5}},
        stuck=(2,),
    ),
    Case(
        "restarts go by the cause and not by the first end",
        "**",
        "0=1+1; 1=5",
        5,
        "TERM",
        given_up="no such module.",
        restarts=1,
        facts={1: {"failed_at": -0.5, "no_retry": "no such module."}},
    ),
    Case("killed after the grace", "**", "0=1; 3s; 1=KILL", 1, "TERM KILL", grace_s=3.0),
    *(
        Case(f"{name} is passed on once", "**", f"!{name}; 0=0; 1=0", code, name, "interrupted")
        for name, code in (("INT", 130), ("TERM", 143), ("HUP", 129))
    ),
    Case("the second signal kills", "**", "!INT; 0.5s; !INT; 0.5s; !INT", None, "INT KILL"),
    Case("delivered twice is one request", "**", "!INT; 0.01s; !INT", None, "INT"),
    Case("a lost terminal is never in a hurry", "**", "!HUP; 1s; !HUP", None, "HUP"),
    Case("a shell ends stopped jobs", "**", "!HUP; !HUP; 0.01s; !TERM", None, "HUP"),
    Case("a signal to everybody", "**", "0=TERM; !TERM; 1=0", 143, "TERM", restarts=3),
    Case("users' signals stop nothing", "*", "!USR1; 0=0", 0, "USR1"),
    Case("servers are stopped when the rest is done", "*-", "0=0; 1=TERM", 0, "TERM"),
    Case("but not fail", "*--", "1=0; 2=3; 0=TERM", 3, "TERM", "rank 2 exited with 3"),
    Case("restarts are counted", "*", "0=4; 0=5; 0=6", 6, restarts=2, earlier=("4", "5")),
    Case("a restart is stopped", "*", "0=4; !TERM; 0=0", 143, "TERM", restarts=2, earlier=("4",)),
    Case("not in effect", "**", "refuted; 0=TERM; 1=1", 5, "TERM", "the strategy", restarts=3),
    *(
        Case(
            "a failure is worse than a strategy without effect",
            "**",
            f"0=7; refuted; 1={code}; 0=0; 1=0",
            0,
            "TERM",
            restarts=1,
            earlier=("7",),
        )
        for code in (0, 7)
    ),
    Case("a required source", "**", "lost; 0=TERM; 1=TERM", 1, "TERM", "the session", restarts=3),
    Case(
        "lost before it",
        "**",
        "0=3; lost; 1=TERM",
        3,
        "TERM",
        given_up="the session failed (a bug).",
        restarts=3,
    ),
    # With other hosts.
    Case("and then stop", "*-", "0=0; done; 1=TERM", 0, "TERM", has_peers=True),
    Case("and this one then", "*", "done; 0=0", 0, has_peers=True),
    Case("elsewhere", "*", "stop; 0=TERM; verdict", 7, "TERM", "server 1", has_peers=True),
    Case("first of all hosts", "**", "0=3; 1=TERM; verdict here", 3, "TERM", has_peers=True),
    Case("a victim here", "*", "0=1; verdict", 7, has_peers=True),
    Case(
        "without a session nothing is waited for",
        "*",
        "0=3; session lost",
        3,
        given_up="the session with the other hosts failed (a bug).",
        has_peers=True,
    ),
    Case("a second signal does not", "*", "!INT; 0=INT; 1s; !INT", 130, "INT", has_peers=True),
    Case("and with servers", "*-", "0=0; stop; done; 1=TERM", 0, "TERM", has_peers=True),
    Case(
        "hosts start again together, and earlier words count no more",
        "*",
        "0=0; stop; again; stop; done; 0=0; done 1",
        0,
        restarts=1,
        earlier=("server 1 exited with 7 on 10.0.0.2",),
        has_peers=True,
    ),
    Case(
        "stopped here, and started again elsewhere",
        "*",
        "stop; !TERM; 0=TERM; again",
        143,
        "TERM",
        restarts=1,
        earlier=("server 1 exited with 7 on 10.0.0.2",),
        has_peers=True,
    ),
    Case(
        "given up by all",
        "*",
        "0=3; verdict here, no use",
        3,
        given_up="no use",
        restarts=3,
        has_peers=True,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)
def test_what_comes_of_a_history(case: Case) -> None:
    rules = Rules(grace_s=case.grace_s, max_restarts=case.restarts)
    job = Job([sign == "*" for sign in case.processes], rules, has_peers=case.has_peers)
    job.facts = dict(case.facts)
    play_out(job, case.history)
    assert job.signals() == [SIGNALS[name] for name in case.signals.split()]
    if case.code is None:
        assert job.outcome is None
        return
    seen = job.verdict()
    assert (seen.exit_code, seen.given_up, seen.stuck) == (case.code, case.given_up, case.stuck)
    assert seen.describe().startswith(case.describes)
    wanted = [f"rank 0 exited with {how}" if how.isdigit() else how for how in case.earlier]
    assert [cause.describe() for cause in seen.earlier] == wanted
    assert seen.attempts == len(wanted) + 1
    assert job.done[-1] == Sweep()


@pytest.mark.parametrize(
    ("steps", "words", "lived_s", "attempts"),
    [
        ((None,) * 4, "aaaa", 1.0, 3),
        ((None,) * 4, "aaaa", 90.0, 4),
        ((7, 7, 7, 7), "aaaa", 90.0, 3),
        ((7, 9, 9, 9), "aaaa", 1.0, 4),
        ((7, 8, 9, 10), "aaaa", 1.0, 4),
        # Failures of different kinds are progress.
        ((None,) * 4, "abcd", 1.0, 4),
    ],
)
def test_s53_three_failures_alike_without_a_new_step_are_enough(
    steps: tuple[int | None, ...], words: str, lived_s: float, attempts: int
) -> None:
    watched = a_job(1, max_restarts=3)
    for step, word in zip(steps, words, strict=True):
        if watched.outcome is None:
            watched.exit(0, code=4, last_words=word, step=step, lived_s=lived_s)
    assert watched.verdict().attempts == attempts
    assert bool(watched.verdict().given_up) == (attempts == 3)


def gathering(attempt: int, **rules: float) -> Job:
    """Make a job that gathers for ATTEMPT and gets no answer."""
    job = Job([True], Rules(max_restarts=3, **rules), answers=attempt > 0)
    if attempt:
        job.essential = None
        play_out(job, "0=5")
    assert (job.state.phase, job.done[-1]) == (policy.GATHERING, Gather(attempt))
    return job


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("signum", [INT, TERM, HUP])
def test_a_signal_ends_the_wait_for_hosts_at_once(attempt: int, signum: int) -> None:
    job = gathering(attempt)
    job.interrupt(USR1)
    assert job.outcome is None
    job.interrupt(signum)
    assert (job.verdict().exit_code, job.signals()) == (128 + signum, [])
    assert len(job.verdict().earlier) == attempt
    # The answer comes too late.
    assert job.take(Gathered(attempt, generation([True]), job.now)) == ()


# ------------------------------------------------------------------- processes that wait for others


# ------------------------------------------------------------------------------- every history


class Dice:
    """A die, from numbers that Hypothesis can shrink."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def roll(self, sides: int) -> int:
        """Return a number below SIDES."""
        return self.numbers.pop(0) % sides if self.numbers else 0


def play(numbers: Sequence[int]) -> Job:
    """Play random events, and then let all remaining processes die."""
    dice = Dice(numbers)
    essential = [dice.roll(4) != 3 for _ in range(1 + dice.roll(4))]
    rules = Rules(grace_s=float(dice.roll(5)), max_restarts=dice.roll(3))
    has_peers = dice.roll(3) == 2
    job = Job(essential, rules, spawns=lambda _: dice.roll(20) != 19, has_peers=has_peers)
    while job.outcome is None:
        if dice.numbers:
            # The next generation may be another, or come late.
            job.essential = [dice.roll(4) != 3 for _ in range(1 + dice.roll(4))]
            if dice.roll(4) == 3:
                job.essential = None
            happen(job, dice)
        else:
            end(job)
    return job


def happen(job: Job, dice: Dice) -> None:
    """Play one event."""
    alive = sorted(job.state.alive)
    match dice.roll(8):
        case 0 | 1 | 7 if job.state.phase == policy.GATHERING:
            come(job, dice)
        case 0 | 1 | 2 if alive:
            die(job, dice, code=(0, 0, 0, 7)[dice.roll(4)])
        case 3 if alive:
            die(job, dice, signum=(KILL, TERM, 11)[dice.roll(3)])
        case 4 if dice.roll(8) == 7:
            job.feed(LOST._replace(is_required=dice.roll(2) == 1))
        case 4:
            job.interrupt((INT, TERM, HUP, USR1)[dice.roll(4)])
        case 5 if dice.roll(4) == 3:
            job.feed(StrategyRejected(("rank 0 left no evidence",), job.now))
        case 5:
            job.wait((0.01, 0.5, 2.0, 50.0)[dice.roll(4)])
        case 6 if job.has_peers and job.state.phase != policy.FINISHED:
            hear(job, dice)
        case _:
            job.now += 0.001


def test_a_host_without_a_place_in_a_job_that_is_done_has_not_failed() -> None:
    state = policy.Policy()
    state.begin()
    state.step(GatherFailed(0, "The job is done.", 0, 1.0))
    assert state.outcome().cause is None


def come(job: Job, dice: Dice) -> None:
    """Deliver the answer to a Gather."""
    attempt = max(0, job.state.attempt - (dice.roll(4) == 3))
    if dice.roll(6) == 5:
        job.feed(GatherFailed(attempt, "a port is taken.", 3, job.now))
    else:
        processes = [dice.roll(4) != 3 for _ in range(1 + dice.roll(4))]
        job.feed(Gathered(attempt, generation(processes, has_peers=job.has_peers), job.now))


def die(job: Job, dice: Dice, code: int = 0, signum: int | None = None) -> None:
    """Let a process end; others may have failed before, and end later."""
    alive = sorted(job.state.alive)
    process = alive.pop(dice.roll(len(alive)))
    also = frozenset(other for other in alive if dice.roll(3) == 2)
    if job.state.phase == policy.RUNNING:
        job.facts = {
            other: {
                "failed_at": job.now - dice.roll(5) / 10,
                "is_victim": dice.roll(2) == 1,
                "raised": (None, 1, 4)[dice.roll(3)],
            }
            for other in (process, *also)
        }
    job.exit(process, code=code, signum=signum, also_failed=also)


def hear(job: Job, dice: Dice) -> None:
    """Deliver a report of another host, on this attempt or the previous one."""
    attempt = max(0, job.state.attempt - dice.roll(2))
    if job.state.phase == policy.STOPPED:
        is_last = job.state.attempt >= job.rules.max_restarts
        is_here = isinstance(job.state.cause, Exited) and dice.roll(2) == 1
        failure = None if is_here else ELSEWHERE
        is_final = is_last or dice.roll(2) == 1
        job.feed(JobVerdict(failure, job.now, attempt, is_final, is_here=is_here))
    elif dice.roll(2):
        job.feed(DONE._replace(at=job.now, attempt=attempt))
    else:
        job.feed(StopRequested(ELSEWHERE, job.now, attempt))


def end(job: Job) -> None:
    """Let a remaining process die."""
    alive = sorted(job.state.alive)
    if job.state.phase == policy.GATHERING:
        job.feed(GatherFailed(job.state.attempt, "nobody came.", 4, job.now))
    elif alive:
        job.exit(alive[0], signum=KILL)
    elif job.state.phase == policy.STOPPED:
        job.feed(JobVerdict(None, job.now, job.state.attempt, is_here=True))
    else:
        assert policy.PEERS in job.state.unfinished, "nobody is left, and still no end"
        job.feed(DONE._replace(attempt=job.state.attempt))


def check(job: Job) -> None:
    """Check the properties of every history."""
    outcome = job.verdict()
    assert job.done[-1] == Sweep()
    stops = [e for e in job.events if isinstance(e, Interrupted) and e.signum != USR1]
    order = list(job.events)
    if stops:
        after = order[order.index(stops[0]) :]
        assert not any(isinstance(event, Started) for event in after), "started after a signal"
    assert 1 <= outcome.attempts <= job.rules.max_restarts + 1
    assert len(outcome.earlier) == outcome.attempts - 1
    check_last_attempt(job, stops)
    check_spawns(job)
    check_kills(job)


def check_last_attempt(job: Job, stops: list[Interrupted]) -> None:
    outcome = job.verdict()
    last = [
        event
        for event in job.events
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
                for event in job.events
            )
            assert job.state.essential <= done | ({policy.PEERS} if heard else set())
        case Interrupted():
            assert outcome.cause is stops[0]
            assert outcome.exit_code == 128 + stops[0].signum
            before = job.events[: job.events.index(stops[0])]
            assert not any(first in before for first in failures[:1])
        case StrategyRejected():
            assert outcome.exit_code == 5
            assert outcome.cause in job.events
        case GatherFailed():
            assert outcome.exit_code in {3, 4}
            assert outcome.cause in job.events
            assert not last
        case SourceFailed():
            assert outcome.exit_code == 1
            assert outcome.cause.is_required
            assert outcome.cause in job.events
        case Failure():
            told = [e.failure for e in job.events if isinstance(e, JobVerdict | StopRequested)]
            assert outcome.cause in told
        case Exited():
            suspects = failures[0].also_failed | {failures[0].process}
            assert outcome.cause.process in suspects
            (end,) = [exited for exited in failures if exited.process == outcome.cause.process]
            given = {end.status.exit_code, outcome.cause.raised}
            assert outcome.exit_code in given - {None, 0}
            others = [
                exited._replace(**job.facts.get(exited.process, {}))
                for exited in failures
                if exited.process in suspects and not exited.fault
            ]
            assert all(
                (outcome.cause.is_victim, outcome.cause.failed_at)
                <= (other.is_victim, other.failed_at)
                for other in others
                if outcome.cause.failed_at is not None and other.failed_at is not None
            )


def check_spawns(job: Job) -> None:
    spawns = [action for action in job.done if isinstance(action, Spawn)]
    assert len(set(spawns)) == len(spawns)
    assert spawns == sorted(spawns, key=lambda spawn: (spawn.attempt, spawn.process))
    alive: set[int] = set()
    for event in job.events:
        if isinstance(event, Started):
            if event.process == 0:
                assert not alive, "born before all were dead"
            alive.add(event.process)
        elif isinstance(event, Exited):
            alive.discard(event.process)
    assert alive == set(job.verdict().stuck)
    for place, action in enumerate(job.done):
        if isinstance(action, Spawn) and action.attempt and action.process == 0:
            assert job.done[place - 2 : place] == [Sweep(), Gather(action.attempt)]


def check_kills(job: Job) -> None:
    polite = [signum for signum in job.signals() if signum not in {KILL, USR1}]
    kills = job.signals().count(KILL)
    attempts = job.verdict().attempts
    assert len(polite) <= attempts
    assert kills <= len(polite)


NUMBERS = st.lists(st.integers(0, 10_000), max_size=60)


@given(NUMBERS)
@examples(250)
def test_what_holds_in_hundreds_of_histories(numbers: list[int]) -> None:
    check(play(numbers))
