"""The policy: `step(state, event, rules) -> (state, actions)` decides and has no side effects.

The caller performs the actions. The answers to Spawn (Started, or Exited if it failed) and Examine
(RootCauses) come before any other event. Before an action that had to wait, the caller asks
`is_current`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from fleetrun.model import ExitStatus, Rules
from fleetrun.run.events import (
    Action,
    Await,
    Cause,
    Event,
    Examine,
    Exited,
    Failure,
    Finish,
    Gather,
    Gathered,
    GatherFailed,
    HostStopped,
    Hung,
    Interrupted,
    JobVerdict,
    Outcome,
    Overdue,
    Ready,
    Retried,
    RootCauses,
    SignalAll,
    SourceFailed,
    Spawn,
    Started,
    StopRequested,
    StrategyRejected,
    Sweep,
    TimerExpired,
    assert_never,
)

HUP, INT, KILL, USR1, USR2, TERM = 1, 2, 9, 10, 12, 15
# Schedulers send these when time is nearly up; acting on them is up to the ranks.
FORWARDED = frozenset((USR1, USR2))
# Wrappers forward a Ctrl-C that the terminal has delivered already; no user is as fast as this.
REPEAT_S = 0.1
# A process that SIGKILL does not end within this time waits for a device that does not answer.
STUCK_S = 30.0

# A process that has raised an exception may exit by itself within this time (or half of the grace):
# Paddle and CUDA need up to seconds for that, and its exit code is wanted.
TEARDOWN_S = 3.0

# The longest wait before another attempt.
LONGEST_WAIT_S = 60.0
# Give up after this many equal failures in a row without a new step.
SAME_FAILURES = 3
# Stands for the processes of other hosts among those that the job waits for.
PEERS = -1
# The source that connects this launcher to those of other hosts.
SESSION = "the session with the other hosts"
# A job that reports no steps has made progress if it ran this long.
SOME_PROGRESS_S = 60.0

# STOPPED: nothing runs here any more, and the verdict on the attempt is awaited.
GATHERING, RUNNING, STOPPING, KILLING, STOPPED, FINISHED = (
    "gathering",
    "running",
    "stopping",
    "killing",
    "stopped",
    "finished",
)


class PolicyState(NamedTuple):
    """The state of the job on this host."""

    # From the plan of this generation: how many processes, and those that the job waits for.
    total: int = 0
    essential: frozenset[int] = frozenset()
    # The essential ones that have not succeeded yet.
    unfinished: frozenset[int] = frozenset()
    next_index: int = 0
    # Processes that await endpoints before they start.
    awaiting: frozenset[int] = frozenset()
    alive: frozenset[int] = frozenset()
    phase: str = GATHERING
    # Whether gathering only begins at the deadline, to let a fault heal.
    is_resting: bool = False
    attempt: int = 0
    # The first thing that went wrong in this attempt.
    cause: Cause | None = None
    # The first signal that asked us to stop: nothing starts any more.
    interrupted: Interrupted | None = None
    # When to send TimerExpired.
    deadline: float | None = None
    # When SIGKILL is sent to the remaining processes.
    kill_at: float = 0.0
    # Processes that failed before any was asked to end: one of them is the culprit.
    suspects: frozenset[int] = frozenset()
    # Of those: the ones given time to exit by themselves, and the ones that did not.
    spared: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    exits: tuple[Exited, ...] = ()
    earlier: tuple[Retried, ...] = ()
    given_up: str = ""

    def outcome(self) -> Outcome:
        """Return the outcome so far, as seen from this host."""
        return Outcome(
            self.cause,
            self.exits,
            self.attempt + 1,
            self.earlier,
            tuple(sorted(self.alive)),
            self.given_up,
        )


Step: TypeAlias = tuple[PolicyState, tuple[Action, ...]]


def begin() -> Step:
    """Return the first state and actions."""
    return _gather(PolicyState())


def _gather(state: PolicyState) -> Step:
    """Begin a generation: gather the hosts."""
    return state._replace(is_resting=False, deadline=None), (Gather(state.attempt),)


def _gathered(state: PolicyState, event: Gathered) -> Step:
    """Adopt the generation's plan and start its first process.

    Processes start in order; one that awaits endpoints starts when they listen. A job on several
    hosts is done when the processes on the other hosts are done, too.
    """
    if not is_current(state, Gather(event.attempt)):
        return state, ()
    processes = event.plan.processes
    essential = frozenset(index for index, spec in enumerate(processes) if spec.essential)
    if event.plan.has_session:
        essential |= {PEERS}
    state = state._replace(
        phase=RUNNING,
        deadline=None,
        total=len(processes),
        essential=essential,
        unfinished=essential,
        awaiting=frozenset(index for index, spec in enumerate(processes) if spec.awaits),
    )
    if not essential:
        return _finish(state)
    return state, (_next(state, 0),) if processes else ()


def _gather_failed(state: PolicyState, event: GatherFailed) -> Step:
    if not is_current(state, Gather(event.attempt)):
        return state, ()
    return _finish(state._replace(cause=event))


def _next(state: PolicyState, process: int) -> Spawn | Await:
    """Return the action that starts PROCESS."""
    is_waiting = process in state.awaiting
    return Await(process, state.attempt) if is_waiting else Spawn(process, state.attempt)


def is_current(state: PolicyState, action: Action) -> bool:
    """Whether ACTION, which had to wait, is still due; a signal may have overtaken it."""
    if isinstance(action, Gather):
        return state.phase == GATHERING and action.attempt == state.attempt
    return not isinstance(action, Spawn | Await) or (
        state.phase == RUNNING and action.attempt == state.attempt
    )


def step(state: PolicyState, event: Event, rules: Rules) -> Step:  # noqa: C901, PLR0911, PLR0912 - one for each event
    """Return the state after EVENT, and the actions that follow."""
    match event:
        case StrategyRejected():
            return _rejected(state, event, rules)
        case SourceFailed():
            return _source_failed(state, event, rules)
        case _ if state.phase == FINISHED:
            return state, ()
        case Gathered():
            return _gathered(state, event)
        case GatherFailed():
            return _gather_failed(state, event)
        case Started():
            return _started(state, event)
        case Ready():
            is_wanted = state.phase == RUNNING and event.attempt == state.attempt
            is_next = is_wanted and event.process == state.next_index
            return state, (Spawn(event.process, state.attempt),) if is_next else ()
        case Exited():
            return _exited(state, event, rules)
        case Overdue():
            return _overdue(state, event, rules)
        case RootCauses():
            return _examined(state, event, rules)
        case Interrupted():
            return _interrupted(state, event, rules)
        case TimerExpired():
            return _elapsed(state, event)
        case Hung():
            return _hung(state, event, rules)
        case StopRequested():
            return _stop_requested(state, event, rules)
        case JobVerdict():
            return _judged(state, event, rules)
        case _:  # pragma: no cover - there are no others
            return assert_never(event)


def _started(state: PolicyState, event: Started) -> Step:
    after = event.process + 1
    state = state._replace(alive=state.alive | {event.process}, next_index=after)
    more = state.phase == RUNNING and after < state.total
    return state, (_next(state, after),) if more else ()


def _exited(state: PolicyState, event: Exited, rules: Rules) -> Step:
    state = state._replace(
        alive=state.alive - {event.process},
        unfinished=state.unfinished
        if event.status.exit_code
        else state.unfinished - {event.process},
        exits=(*state.exits, event),
    )
    if state.phase == RUNNING and event.status.exit_code:
        # Any process counts: ranks would wait forever for a dead parameter server.
        suspects = event.also_failed | {event.process}
        return _stop(state._replace(cause=event, suspects=suspects), TERM, event.at, rules)
    if state.phase == RUNNING and not state.unfinished:
        return _stop(state, TERM, event.at, rules)
    if state.phase != RUNNING and not state.alive:
        return _all_dead(state, event.at, rules)
    if state.phase == STOPPING and state.spared:
        spared = state.spared - {event.process}
        deadline = state.deadline if spared else state.kill_at
        return state._replace(spared=spared, deadline=deadline), ()
    return state, ()


def _overdue(state: PolicyState, event: Overdue, rules: Rules) -> Step:
    """Stop as if the process had exited; it has had its time for that."""
    if state.phase != RUNNING:
        return state, ()
    suspects = event.exited.also_failed | {event.exited.process}
    state = state._replace(cause=event.exited, suspects=suspects, late=suspects)
    return _stop(state, TERM, event.at, rules)


def culprit(exits: Sequence[Exited]) -> Exited:
    """Return the first of these failures; those that look like the loss of a peer come last."""
    return min(exits, key=lambda failure: (failure.is_victim, failed_at(failure)))


def failed_at(exited: Exited) -> float:
    """Return when the process raised its exception, or else when it ended."""
    return exited.at if exited.failed_at is None else exited.failed_at


def _examined(state: PolicyState, event: RootCauses, rules: Rules) -> Step:
    """Make the first failure the cause, and finish or restart."""
    first = culprit(event.exits)
    if first.process in state.late and first.raised and first.status.signum in {TERM, KILL}:
        # It had failed already when it was signalled.
        first = first._replace(status=ExitStatus(code=first.raised))
    state = state._replace(cause=first)
    return _finish(state) if state.alive else _decide(state, event.at, rules)


def _hung(state: PolicyState, event: Hung, rules: Rules) -> Step:
    if state.phase == RUNNING:
        return _stop(state._replace(cause=event), TERM, event.at, rules)
    return state, ()


def _stop_requested(state: PolicyState, event: StopRequested, rules: Rules) -> Step:
    """Stop, as the other hosts do."""
    if event.is_fenced:
        return _kill(state, event.at) if state.alive else (state, ())
    if state.phase == RUNNING and event.attempt == state.attempt:
        return _stop(state._replace(cause=event.failure), TERM, event.at, rules)
    return state, ()


def _source_failed(state: PolicyState, event: SourceFailed, rules: Rules) -> Step:
    """End the job if the source that failed is required."""
    if not event.is_required:
        return state, ()
    if event.source == SESSION:
        # Nothing can be agreed with the other hosts any more.
        state = state._replace(
            essential=state.essential - {PEERS}, unfinished=state.unfinished - {PEERS}
        )
    why = f"{event.describe()}."
    if state.phase == STOPPED:
        return _finish(state._replace(given_up=why))
    if state.cause is None:
        return _rejected(state, event, rules)
    is_open = state.phase in {STOPPING, KILLING} and isinstance(state.cause, Retried)
    if is_open and state.attempt < rules.max_restarts:
        # There would have been another attempt.
        state = state._replace(given_up=state.given_up or why)
    return state, ()


def _rejected(state: PolicyState, event: StrategyRejected | SourceFailed, rules: Rules) -> Step:
    """Make EVENT the cause unless there is one."""
    is_early = isinstance(event, StrategyRejected) and state.phase == GATHERING
    if state.cause is not None or is_early:
        # An earlier attempt has run with this strategy already.
        return state, ()
    if state.phase in {GATHERING, RUNNING}:
        return _stop(state._replace(cause=event), TERM, event.at, rules)
    state = state._replace(cause=event)
    # A rank writes evidence at its exit, so it may be evaluated after the last one.
    return state, (Finish(state.outcome()),) if state.phase == FINISHED else ()


def _stop(state: PolicyState, signum: int, at: float, rules: Rules) -> Step:
    """Ask all processes to end."""
    if not state.alive:
        return _all_dead(state, at, rules)
    spared = (state.suspects - state.late) & state.alive
    kill_at = at + rules.grace_s
    deadline = min(at + TEARDOWN_S, at + rules.grace_s / 2) if spared else kill_at
    state = state._replace(phase=STOPPING, deadline=deadline, kill_at=kill_at, spared=spared)
    return state, (SignalAll(signum, spared),)


def _all_dead(state: PolicyState, at: float, rules: Rules) -> Step:
    """Finish, or wait before another attempt, once it is known which process failed first."""
    examine = _to_examine(state)
    return (state._replace(phase=STOPPING), examine) if examine else _decide(state, at, rules)


def _to_examine(state: PolicyState) -> tuple[Examine, ...]:
    """Return the action that finds out which process failed first, if any did."""
    if not isinstance(state.cause, Exited) or _has_fault(state.cause):
        return ()
    suspects = (exited for exited in state.exits if exited.process in state.suspects)
    failures = tuple(exited for exited in suspects if exited.status.exit_code)
    # Even SIGKILL may not have ended one that was overdue.
    return (Examine(failures),) if failures else ()


class Decision(NamedTuple):
    """Whether a failure is final; `given_up` says why, if the rules would allow another attempt."""

    is_final: bool
    given_up: str


def decide(
    no_retry: str, restarts: int, max_restarts: int, *, is_departure: bool = False
) -> Decision:
    """Decide whether another attempt follows a failure, on one host or on several.

    NO_RETRY says why none can help. RESTARTS counts restarts after failures; a change of the set of
    hosts (IS_DEPARTURE) is no failure.

    >>> decide("", 0, 1).is_final, decide("", 1, 1).is_final
    (False, True)
    >>> decide("", 1, 1, is_departure=True).is_final, decide("no such module", 0, 1)
    (False, Decision(is_final=True, given_up='no such module'))
    """
    is_allowed = is_departure or restarts < max_restarts
    return Decision(bool(no_retry) or not is_allowed, no_retry if is_allowed else "")


def _decide(state: PolicyState, at: float, rules: Rules) -> Step:
    """Finish or start again; on several hosts, wait for the coordinator's verdict."""
    cause = state.cause
    if cause is None:
        return _finish(state)
    no_retry = state.given_up or _no_retry(state, rules)
    state = state._replace(phase=STOPPED, deadline=None)
    if PEERS in state.essential:
        return state, (HostStopped(state.attempt, cause, no_retry),)
    is_final, given_up = decide(no_retry, state.attempt, rules.max_restarts)
    # Where no attempt could ever help, there is nothing to explain.
    is_explained = isinstance(cause, Retried) and not (state.interrupted or _has_fault(cause))
    explained = given_up if state.given_up or is_explained else ""
    verdict = JobVerdict(None, at, state.attempt, is_final, explained, is_here=True)
    return _judged(state, verdict, rules)


def _has_fault(cause: Cause | None) -> bool:
    return isinstance(cause, Exited) and bool(cause.fault)


def _no_retry(state: PolicyState, rules: Rules) -> str:
    """Return why no other attempt can help, as far as this host knows; empty if one can."""
    cause = state.cause
    if isinstance(cause, Exited) and cause.fault:
        return cause.fault
    if not isinstance(cause, Retried):
        return "" if cause is None else Outcome(cause).describe()
    if state.interrupted is not None:
        return Outcome(state.interrupted).describe()
    # Hosts that come and go make an elastic job start again without --max_restart.
    return (
        "" if not (rules.max_restarts or state.earlier) else _no_progress((*state.earlier, cause))
    )


def _judged(state: PolicyState, event: JobVerdict, rules: Rules) -> Step:
    """Finish or start again, as all hosts do."""
    if state.phase == GATHERING and event.is_final and event.failure is not None:
        return _finish(state._replace(cause=event.failure))
    is_current = event.attempt == state.attempt
    if is_current and event.failure is None and not event.is_here:
        return _all_done(state, event, rules)
    if state.phase != STOPPED or not is_current:
        # The others have lost this host; its processes are being stopped or killed.
        return state, ()
    cause = event.failure or state.cause
    state = state._replace(cause=cause)
    if event.is_final or not isinstance(cause, Retried):
        has_restarts = rules.max_restarts or state.earlier
        return _finish(state._replace(given_up=event.given_up if has_restarts else ""))
    again = PolicyState(
        attempt=state.attempt + 1,
        is_resting=True,
        earlier=(*state.earlier, cause),
    )
    if state.interrupted is not None:
        return _finish(again._replace(cause=state.interrupted))
    # Hosts that come and go need no time to heal.
    has_failed = not (isinstance(cause, Failure) and cause.is_departure)
    wait = backoff(rules.backoff_s, state.attempt) if has_failed else 0.0
    return again._replace(deadline=event.at + wait), (Sweep(),)


def _all_done(state: PolicyState, event: JobVerdict, rules: Rules) -> Step:
    """Take note that the trainers of all other hosts are done."""
    state = state._replace(unfinished=state.unfinished - {PEERS})
    if isinstance(state.cause, Failure) and not state.unfinished:
        # This host had lost sight of the others when the job was done.
        state = state._replace(cause=None)
    if state.phase == STOPPED and not state.unfinished:
        # What ended it here has come too late for the others, and no other verdict follows.
        return _finish(state)
    is_done = state.phase == RUNNING and not state.unfinished
    return _stop(state, TERM, event.at, rules) if is_done else (state, ())


def backoff(first_s: float, attempt: int) -> float:
    """Return how many seconds to wait after ATTEMPT: none after the first, then twice as long.

    >>> [backoff(1.0, attempt) for attempt in (0, 1, 4, 31)]
    [0.0, 1.0, 8.0, 60.0]
    """
    return min(first_s * 2.0 ** min(attempt - 1, 30), LONGEST_WAIT_S) if attempt else 0.0


def _no_progress(causes: Sequence[Retried]) -> str:
    """Return why another attempt would fail like these, or nothing."""
    last = causes[-1]
    if isinstance(last, Exited) and last.no_retry:
        return last.no_retry
    recent = causes[-SAME_FAILURES:]
    if len(recent) == SAME_FAILURES and all(
        isinstance(cause, Exited)
        and _is_same_failure(cause, last)
        and not _has_progressed(recent[0], cause)
        for cause in recent
    ):
        return f"no progress: it failed the same way {SAME_FAILURES} times without a new step."
    return ""


def _is_same_failure(failure: Exited, other: Retried) -> bool:
    return isinstance(other, Exited) and (failure.process, failure.status, failure.last_words) == (
        other.process,
        other.status,
        other.last_words,
    )


def _has_progressed(first: Retried, later: Exited) -> bool:
    """Whether LATER got further than FIRST."""
    if later.step is None:
        return later.lived_s >= SOME_PROGRESS_S
    return isinstance(first, Exited) and first.step is not None and later.step > first.step


def _finish(state: PolicyState) -> Step:
    state = state._replace(phase=FINISHED, deadline=None)
    return state, (Sweep(), Finish(state.outcome()))


def _interrupted(state: PolicyState, event: Interrupted, rules: Rules) -> Step:
    if event.signum in FORWARDED:
        return state, (SignalAll(event.signum),) if state.alive else ()
    first = state.interrupted
    if first is None:
        state = state._replace(interrupted=event)
        if state.phase in {GATHERING, RUNNING}:
            # KILL has hit only the keeper, the process that the user has started.
            signum = TERM if event.signum == KILL else event.signum
            return _stop(state._replace(cause=event), signum, event.at, rules)
        # The ranks are ending already; a scheduler's TERM to ranks and launcher is one request.
        return state, ()
    # A shell that loses its terminal repeats the SIGHUP that the kernel has sent.
    is_repeat = event.signum == first.signum and event.at - first.at < REPEAT_S
    if state.phase == KILLING or is_repeat or event.signum == HUP:
        return state, ()
    # After a second request, do not wait for the other hosts.
    return _finish(state) if state.phase == STOPPED else _kill(state, event.at)


def _elapsed(state: PolicyState, event: TimerExpired) -> Step:
    if state.deadline is None or event.at < state.deadline:
        return state, ()
    if state.phase == GATHERING:
        return _gather(state)
    if state.phase == KILLING:
        examine = _to_examine(state)
        return (state, examine) if examine else _finish(state)
    if state.spared:
        unspared = state.alive - state.spared
        state = state._replace(spared=frozenset(), late=state.spared, deadline=state.kill_at)
        return state, (SignalAll(TERM, unspared),)
    return _kill(state, event.at)


def _kill(state: PolicyState, at: float) -> Step:
    late = state.late | state.spared
    state = state._replace(phase=KILLING, deadline=at + STUCK_S, spared=frozenset(), late=late)
    return state, (SignalAll(KILL),)
