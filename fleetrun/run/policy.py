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
)

HUP, INT, KILL, USR1, USR2, TERM = 1, 2, 9, 10, 12, 15
# Requests to end: a rank gets them before what it has started.
POLITE = frozenset((HUP, INT, TERM))
# Schedulers send these when time is nearly up; acting on them is up to the ranks.
FORWARDED = frozenset((USR1, USR2))
# Wrappers forward a Ctrl-C that the terminal has delivered already; no user is as fast as this.
REPEAT_S = 0.1
# A process that SIGKILL does not end within this time waits for a device that does not answer.
STUCK_S = 30.0

# Give up after this many equal failures in a row without a new step.
SAME_FAILURES = 3
# Stands for the processes of other hosts among those that the job waits for.
PEERS = -1
# The source that connects this launcher to those of other hosts.
SESSION = "the session with the other hosts"
# A job that reports no steps has made progress if it ran this long.
SOME_PROGRESS_S = 60.0

# STOPPED: nothing runs here any more, and the verdict on the attempt is awaited.
GATHERING, RUNNING, STOPPING = "gathering", "running", "stopping"
KILLING, STOPPED, FINISHED = "killing", "stopped", "finished"

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
        # When to send TimerExpired.
        self.deadline: float | None = None
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
        # Processes that failed before any was asked to end: one of them is the culprit. Of those,
        # the ones that had raised an exception and were still ending.
        self._failed: frozenset[int] = frozenset()
        self._ending: frozenset[int] = frozenset()
        # Why no other attempt is made, although the rules allow one.
        self._given_up = ""

    def begin(self) -> Actions:
        """Begin to gather the hosts of an attempt."""
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
        """Take EVENT, and return the actions that follow; once FINISHED, `outcome` is final."""
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
                self.cause = event if event.exit_code else None
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
            case JobVerdict():
                return self._judged(event)
            case Overdue() | Hung() | StopRequested() if self.phase != RUNNING:
                return ()
            case Overdue(exited=exited):
                self._failed = exited.also_failed | {exited.process}
                return self._stop(exited, event.at)
            case Hung():
                return self._stop(event, event.at)
            case StopRequested():
                is_current = event.attempt == self.attempt
                return self._stop(event.failure, event.at) if is_current else ()

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
        return () if self.alive else self._all_ended(event.at)

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
        # A shell that loses its terminal repeats the kernel's SIGHUP, or sends who is stopped TERM.
        is_repeat = first.signum in {event.signum, HUP} and event.at - first.at < REPEAT_S
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
        if self.cause is None:
            return self._reject(event)
        # No attempt can do without it.
        self._given_up = self._given_up or f"{event.describe()}."
        return self._finish() if self.phase == STOPPED else ()

    def _reject(self, event: StrategyRejected | SourceFailed) -> Actions:
        """Make EVENT the cause unless there is one."""
        is_early = isinstance(event, StrategyRejected) and self.phase == GATHERING
        if self.cause is not None or is_early:
            # An earlier attempt has run with this strategy already.
            return ()
        if self.phase in {GATHERING, RUNNING}:
            return self._stop(event, event.at)
        # A rank writes evidence at its exit, so it may be evaluated after the last one.
        self.cause = event
        return ()

    # Ending ---------------------------------------------------------------------------------------

    def _stop(self, cause: Cause | None, at: float, signum: int = TERM) -> Actions:
        """Ask all processes to end because of CAUSE; None: the job is done."""
        self.cause = cause or self.cause
        if not self.alive:
            return self._all_ended(at)
        self.phase, self.deadline = STOPPING, at + self.rules.grace_s
        self._ending = self._failed & self.alive
        return (SignalAll(signum),)

    def _timer_expired(self, event: TimerExpired) -> Actions:
        if self.deadline is None or event.at < self.deadline:
            return ()
        if self.phase == KILLING:
            return self._examine() or self._finish()
        return self._kill(event.at)

    def _kill(self, at: float) -> Actions:
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
        # Even SIGKILL may not have ended one.
        return (Examine(failures),) if failures else ()

    def _examined(self, event: RootCauses) -> Actions:
        """Make the first failure the cause, and finish or restart."""
        first = culprit(event.exits)
        was_signalled = first.process in self._ending and first.status.signum in {TERM, KILL}
        if was_signalled and first.raised:
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
        if self.interrupted is not None or not isinstance(cause, Retried):
            return Outcome(self.interrupted or cause).describe()
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
        interrupted = self.interrupted
        self.attempt, self.earlier = self.attempt + 1, (*self.earlier, cause)
        self._begin_attempt()
        self.cause = interrupted
        return self._finish() if interrupted else (Sweep(), *self.begin())

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
        return (Sweep(),)


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


def _no_progress(causes: Sequence[Retried]) -> str:
    """Return why another attempt would fail like these, or nothing."""
    last = causes[-1]
    if isinstance(last, Exited) and last.no_retry:
        return last.no_retry
    recent = [cause for cause in causes[-SAME_FAILURES:] if isinstance(cause, Exited)]
    kinds = {(failure.process, failure.status, failure.last_words) for failure in recent}
    if len(recent) < SAME_FAILURES or len(kinds) > 1:
        return ""
    if any(_has_progressed(recent[0], failure) for failure in recent):
        return ""
    return f"no progress: it failed the same way {SAME_FAILURES} times without a new step."


def _has_progressed(first: Exited, later: Exited) -> bool:
    """Whether LATER got further than FIRST."""
    if later.step is None:
        return later.lived_s >= SOME_PROGRESS_S
    return first.step is not None and later.step > first.step
