"""The policy: what follows from each event. It decides, and touches nothing but its own state.

The caller performs the actions that `Policy.step` returns. The answers to Spawn (Started, or Exited
if it failed) and Examine (RootCauses) come before any other event. Before an action that had to
wait, the caller asks `is_current`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from fleetrun.model import ExitStatus, Rules
from fleetrun.run.events import (
    Action,
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

Actions: TypeAlias = tuple[Action, ...]


class Policy:
    """The state of the job on this host."""

    def __init__(self) -> None:
        self.rules = Rules()
        self.attempt = 0
        # What ended each earlier attempt.
        self.earlier: tuple[Retried, ...] = ()
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.phase = GATHERING
        # Whether gathering only begins at the deadline, to let a fault heal.
        self.is_resting = False
        # When to send TimerExpired, and when SIGKILL is sent to the remaining processes.
        self.deadline: float | None = None
        self.kill_at = 0.0
        # How many processes there are; those that the job waits for, and of these the ones that
        # have not succeeded yet.
        self.total = 0
        self.essential: frozenset[int] = frozenset()
        self.unfinished: set[int] = set()
        self.alive: set[int] = set()
        self.exits: list[Exited] = []
        # The first thing that went wrong, and the first signal that asked us to stop.
        self.cause: Cause | None = None
        self.interrupted: Interrupted | None = None
        # Processes that failed before any was asked to end: one of them is the culprit. Of those:
        # the ones that are given time to exit by themselves, and the ones that did not.
        self._failed: frozenset[int] = frozenset()
        self._given_time: frozenset[int] = frozenset()
        self._overdue: frozenset[int] = frozenset()
        # Why no other attempt is made, although the rules allow one.
        self._given_up = ""

    def begin(self) -> Actions:
        """Begin to gather the hosts of an attempt."""
        self.is_resting, self.deadline = False, None
        return (Gather(self.attempt),)

    def outcome(self) -> Outcome:
        """Return the outcome so far, as seen from this host."""
        stuck = tuple(sorted(self.alive))
        exits, attempts = tuple(self.exits), self.attempt + 1
        return Outcome(self.cause, exits, attempts, self.earlier, stuck, self._given_up)

    def is_current(self, action: Action) -> bool:
        """Whether ACTION, which had to wait, is still due; a signal may have overtaken it."""
        if isinstance(action, Gather):
            return self.phase == GATHERING and action.attempt == self.attempt
        if isinstance(action, Spawn):
            return self.phase == RUNNING and action.attempt == self.attempt
        return True

    def step(self, event: Event) -> Actions:  # noqa: C901, PLR0911, PLR0912 - one case for each event
        """Take EVENT, and return the actions that follow."""
        match event:
            case StrategyRejected():
                return self._reject(event)
            case SourceFailed():
                return self._source_failed(event)
            case _ if self.phase == FINISHED:
                return ()
            case Gathered() if self.is_current(Gather(event.attempt)):
                return self._gathered(event)
            case GatherFailed() if self.is_current(Gather(event.attempt)):
                self.cause = event
                return self._finish()
            case Gathered() | GatherFailed():
                return ()
            case Started(process=process):
                self.alive.add(process)
                has_more = self.phase == RUNNING and process + 1 < self.total
                return (Spawn(process + 1, self.attempt),) if has_more else ()
            case Exited():
                return self._exited(event)
            case RootCauses():
                return self._examined(event)
            case Interrupted():
                return self._interrupted(event)
            case TimerExpired():
                return self._timer_expired(event)
            case Overdue(exited=exited) if self.phase == RUNNING:
                # As if it had exited; it has had its time for that.
                self._failed = self._overdue = exited.also_failed | {exited.process}
                return self._stop(exited, event.at)
            case Hung() if self.phase == RUNNING:
                return self._stop(event, event.at)
            case StopRequested(attempt=self.attempt) if self.phase == RUNNING:
                return self._stop(event.failure, event.at)
            case Overdue() | Hung() | StopRequested():
                return ()
            case JobVerdict():
                return self._judged(event)
            case _:  # pragma: no cover - there are no others
                return assert_never(event)

    # Running --------------------------------------------------------------------------------------

    def _gathered(self, event: Gathered) -> Actions:
        """Adopt the plan and start its first process; the others follow in order.

        A job on several hosts is done when the processes on the other hosts are done, too.
        """
        processes = event.plan.processes
        essential = {index for index, spec in enumerate(processes) if spec.essential}
        if event.plan.has_session:
            essential.add(PEERS)
        self.rules, self.total = event.plan.rules, len(processes)
        self.essential, self.unfinished = frozenset(essential), essential
        self.phase, self.deadline = RUNNING, None
        if not essential:
            return self._finish()
        return (Spawn(0, self.attempt),) if processes else ()

    def _exited(self, event: Exited) -> Actions:
        self.alive.discard(event.process)
        self.exits.append(event)
        if not event.status.exit_code:
            self.unfinished.discard(event.process)
        if self.phase == RUNNING:
            if event.status.exit_code:
                # Any process counts: ranks would wait forever for a dead parameter server.
                self._failed = event.also_failed | {event.process}
                return self._stop(event, event.at)
            return () if self.unfinished else self._stop(None, event.at)
        if not self.alive:
            return self._all_ended(event.at)
        if self.phase == STOPPING and self._given_time:
            self._given_time -= {event.process}
            if not self._given_time:
                self.deadline = self.kill_at
        return ()

    def _interrupted(self, event: Interrupted) -> Actions:
        if event.signum in FORWARDED:
            return (SignalAll(event.signum),) if self.alive else ()
        first = self.interrupted
        if first is None:
            self.interrupted = event
            if self.phase in {GATHERING, RUNNING}:
                # KILL has hit only the keeper, the process that the user has started.
                return self._stop(event, event.at, TERM if event.signum == KILL else event.signum)
            # The ranks are ending already; a scheduler's TERM to ranks and launcher is one request.
            return ()
        # A shell that loses its terminal repeats the SIGHUP that the kernel has sent.
        is_repeat = event.signum == first.signum and event.at - first.at < REPEAT_S
        if self.phase == KILLING or is_repeat or event.signum == HUP:
            return ()
        # After a second request, do not wait for the other hosts.
        return self._finish() if self.phase == STOPPED else self._kill(event.at)

    def _source_failed(self, event: SourceFailed) -> Actions:
        """End the job if the source that failed is required."""
        if not event.is_required:
            return ()
        if event.source == SESSION:
            # Nothing can be agreed with the other hosts any more.
            self.essential -= {PEERS}
            self.unfinished.discard(PEERS)
        why = f"{event.describe()}."
        if self.phase == STOPPED:
            self._given_up = why
            return self._finish()
        if self.cause is None:
            return self._reject(event)
        may_retry = isinstance(self.cause, Retried) and self.attempt < self.rules.max_restarts
        if self.phase in {STOPPING, KILLING} and may_retry:
            self._given_up = self._given_up or why
        return ()

    def _reject(self, event: StrategyRejected | SourceFailed) -> Actions:
        """Make EVENT the cause unless there is one."""
        is_early = isinstance(event, StrategyRejected) and self.phase == GATHERING
        if self.cause is not None or is_early:
            # An earlier attempt has run with this strategy already.
            return ()
        if self.phase in {GATHERING, RUNNING}:
            return self._stop(event, event.at)
        self.cause = event
        # A rank writes evidence at its exit, so it may be evaluated after the last one.
        return (Finish(self.outcome()),) if self.phase == FINISHED else ()

    # Ending ---------------------------------------------------------------------------------------

    def _stop(self, cause: Cause | None, at: float, signum: int = TERM) -> Actions:
        """Ask all processes to end because of CAUSE; None: the job is done."""
        self.cause = cause or self.cause
        if not self.alive:
            return self._all_ended(at)
        self.phase, self.kill_at = STOPPING, at + self.rules.grace_s
        self._given_time = (self._failed - self._overdue) & self.alive
        soon = min(at + TEARDOWN_S, at + self.rules.grace_s / 2)
        self.deadline = soon if self._given_time else self.kill_at
        return (SignalAll(signum, self._given_time),)

    def _timer_expired(self, event: TimerExpired) -> Actions:
        if self.deadline is None or event.at < self.deadline:
            return ()
        if self.phase == GATHERING:
            return self.begin()
        if self.phase == KILLING:
            return self._examine() or self._finish()
        if not self._given_time:
            return self._kill(event.at)
        asked = frozenset(self.alive - self._given_time)
        self._overdue, self._given_time = self._given_time, frozenset()
        self.deadline = self.kill_at
        return (SignalAll(TERM, asked),)

    def _kill(self, at: float) -> Actions:
        self._overdue, self._given_time = self._overdue | self._given_time, frozenset()
        self.phase, self.deadline = KILLING, at + STUCK_S
        return (SignalAll(KILL),)

    def _all_ended(self, at: float) -> Actions:
        """Finish or start again, once it is known which process failed first."""
        self.phase = STOPPING
        return self._examine() or self._decide(at)

    def _examine(self) -> Actions:
        """Return the action that finds out which process failed first, if any did."""
        if not isinstance(self.cause, Exited) or self.cause.fault:
            return ()
        failures = tuple(
            it for it in self.exits if it.process in self._failed and it.status.exit_code
        )
        # Even SIGKILL may not have ended one that was overdue.
        return (Examine(failures),) if failures else ()

    def _examined(self, event: RootCauses) -> Actions:
        """Make the first failure the cause, and finish or restart."""
        first = culprit(event.exits)
        was_signalled = first.process in self._overdue and first.status.signum in {TERM, KILL}
        if was_signalled and first.raised:
            # It had failed already when it was signalled.
            first = first._replace(status=ExitStatus(code=first.raised))
        self.cause = first
        return self._finish() if self.alive else self._decide(event.at)

    def _decide(self, at: float) -> Actions:
        """Finish or start again; on several hosts, wait for the coordinator's verdict."""
        cause = self.cause
        if cause is None:
            return self._finish()
        no_retry = self._given_up or self._no_retry(cause)
        self.phase, self.deadline = STOPPED, None
        if PEERS in self.essential:
            return (HostStopped(self.attempt, cause, no_retry),)
        is_final, given_up = decide(no_retry, self.attempt, self.rules.max_restarts)
        # Where no attempt could ever help, there is nothing to explain.
        has_fault = isinstance(cause, Exited) and bool(cause.fault)
        is_explained = isinstance(cause, Retried) and not (self.interrupted or has_fault)
        explained = given_up if self._given_up or is_explained else ""
        return self._judged(JobVerdict(None, at, self.attempt, is_final, explained, is_here=True))

    def _no_retry(self, cause: Cause) -> str:
        """Return why no other attempt can help, as far as this host knows; empty if one can."""
        if isinstance(cause, Exited) and cause.fault:
            return cause.fault
        if not isinstance(cause, Retried):
            return Outcome(cause).describe()
        if self.interrupted is not None:
            return Outcome(self.interrupted).describe()
        # Hosts that come and go make an elastic job start again without --max_restart.
        has_restarts = self.rules.max_restarts or self.earlier
        return _no_progress((*self.earlier, cause)) if has_restarts else ""

    def _judged(self, event: JobVerdict) -> Actions:
        """Finish or start again, as all hosts do."""
        if self.phase == GATHERING and event.is_final and event.failure is not None:
            self.cause = event.failure
            return self._finish()
        is_current = event.attempt == self.attempt
        if is_current and event.failure is None and not event.is_here:
            return self._all_done(event)
        if self.phase != STOPPED or not is_current:
            # The others have lost this host; its processes are being stopped or killed.
            return ()
        cause = self.cause = event.failure or self.cause
        if event.is_final or not isinstance(cause, Retried):
            has_restarts = self.rules.max_restarts or self.earlier
            self._given_up = event.given_up if has_restarts else ""
            return self._finish()
        interrupted, failed_attempt = self.interrupted, self.attempt
        self.attempt += 1
        self.earlier = (*self.earlier, cause)
        self._begin_attempt()
        self.is_resting = True
        if interrupted is not None:
            self.cause = interrupted
            return self._finish()
        # Hosts that come and go need no time to heal.
        has_failed = not (isinstance(cause, Failure) and cause.is_departure)
        wait_s = backoff(self.rules.backoff_s, failed_attempt) if has_failed else 0.0
        self.deadline = event.at + wait_s
        return (Sweep(),)

    def _all_done(self, event: JobVerdict) -> Actions:
        """Take note that the trainers of all other hosts are done."""
        self.unfinished.discard(PEERS)
        if self.unfinished:
            return ()
        if isinstance(self.cause, Failure):
            # This host had lost sight of the others when the job was done.
            self.cause = None
        if self.phase == STOPPED:
            # What ended it here has come too late for the others, and no other verdict follows.
            return self._finish()
        return self._stop(None, event.at) if self.phase == RUNNING else ()

    def _finish(self) -> Actions:
        self.phase, self.deadline = FINISHED, None
        return Sweep(), Finish(self.outcome())


def culprit(exits: Sequence[Exited]) -> Exited:
    """Return the first of these failures; those that look like the loss of a peer come last."""
    return min(exits, key=lambda failure: (failure.is_victim, failed_at(failure)))


def failed_at(exited: Exited) -> float:
    """Return when the process raised its exception, or else when it ended."""
    return exited.at if exited.failed_at is None else exited.failed_at


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
