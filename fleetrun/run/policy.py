"""What to do next, decided without doing it: `step(state, event, rules) -> (state, actions)`.

Who performs the actions feeds each Spawn's Started (or Exited, if it cannot be started), each
Examine's Examined and each StopGathering's GatherFailed back before anything else, and asks
`stands` before it performs what had to wait.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from fleetrun.model import ExitStatus, Rules
from fleetrun.run.events import (
    Action,
    Arbitrate,
    Arbitrated,
    Await,
    Cause,
    CutOff,
    Elapsed,
    Event,
    Examine,
    Examined,
    Exited,
    Finish,
    Gather,
    Gathered,
    GatherFailed,
    Hung,
    Interrupted,
    Outcome,
    PeerFailed,
    PeersDone,
    Ready,
    Refuted,
    Retried,
    SignalAll,
    SourceFailed,
    Spawn,
    Started,
    StopGathering,
    Sweep,
    assert_never,
)

HUP, INT, KILL, USR1, USR2, TERM = 1, 2, 9, 10, 12, 15
# A scheduler's "time is nearly up": for the ranks to act on, not for us.
PASSED_ON = frozenset((USR1, USR2))
# Wrappers pass a Ctrl-C on that the terminal delivered already; nobody presses it twice as fast.
REPEAT_S = 0.1
# What SIGKILL does not end within this time waits for a device that does not answer.
STUCK_S = 30.0

# Who has raised an exception already may end by itself within this time (or half of the grace):
# Paddle and CUDA need up to seconds for that, and the exit code is wanted.
TEARDOWN_S = 3.0

# Nobody waits longer than this for another attempt.
LONGEST_WAIT_S = 60.0
# So many failures of the same kind in a row, without a new step, are enough.
SAME_FAILURES = 3
# Stands among the processes that the job waits for, for those of other hosts.
PEERS = -1
# The source without which nothing can be agreed with other hosts.
SESSION = "the session with the other hosts"
# A job that tells no steps, but ran this long, has got somewhere.
SOME_PROGRESS_S = 60.0

GATHERING, RUNNING, STOPPING, KILLING, ARBITRATING, WAITING, FINISHED = (
    "gathering",
    "running",
    "stopping",
    "killing",
    "arbitrating",
    "waiting",
    "finished",
)


class State(NamedTuple):
    """Where the job stands."""

    # How long it may take to gather.
    patience_s: float
    # The plan of this generation: how many processes, and whom the job waits for.
    total: int = 0
    essential: frozenset[int] = frozenset()
    # Essential processes that have not succeeded yet.
    owed: frozenset[int] = frozenset()
    next_index: int = 0
    # Processes that wait for something before they start.
    awaiting: frozenset[int] = frozenset()
    alive: frozenset[int] = frozenset()
    phase: str = GATHERING
    attempt: int = 0
    # The first thing that went wrong in this attempt.
    cause: Cause | None = None
    # The first signal that asked us to stop: nothing starts any more.
    interrupted: Interrupted | None = None
    # When to send Elapsed.
    deadline: float | None = None
    # When SIGKILL is sent to who is left then.
    kill_at: float = 0.0
    # Who failed before anybody was asked to end: one of them is the culprit.
    suspects: frozenset[int] = frozenset()
    # Those of them that end by themselves, it is hoped; and those that then had to be asked.
    spared: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    exits: tuple[Exited, ...] = ()
    earlier: tuple[Retried, ...] = ()
    given_up: str = ""

    def outcome(self) -> Outcome:
        """How it went, seen from here."""
        return Outcome(
            self.cause,
            self.exits,
            self.attempt + 1,
            self.earlier,
            tuple(sorted(self.alive)),
            self.given_up,
        )


Step: TypeAlias = tuple[State, tuple[Action, ...]]


def begin(at: float, patience_s: float) -> Step:
    """Return the first state and actions; gathering may take PATIENCE_S seconds."""
    return _gather(State(patience_s), at)


def _gather(state: State, at: float) -> Step:
    """Begin a generation: find out who takes part."""
    return state._replace(deadline=at + state.patience_s), (Gather(state.attempt),)


def _gathered(state: State, event: Gathered) -> Step:
    """Take over the plan of the generation, and start its first process.

    Those that await something are started when it is there, and those after them after that. A job
    that has other hosts is done when those on other hosts are done, too.
    """
    if not stands(state, Gather(event.attempt)):
        return state, ()
    processes = event.plan.processes
    essential = frozenset(index for index, one in enumerate(processes) if one.essential)
    if event.plan.has_session:
        essential |= {PEERS}
    state = state._replace(
        phase=RUNNING,
        deadline=None,
        total=len(processes),
        essential=essential,
        owed=essential,
        awaiting=frozenset(index for index, one in enumerate(processes) if one.awaits),
    )
    if not essential:
        return _finish(state)
    return state, (_next(state, 0),) if processes else ()


def _gather_failed(state: State, event: GatherFailed) -> Step:
    if not stands(state, Gather(event.attempt)):
        return state, ()
    return _finish(state._replace(cause=event))


def _next(state: State, process: int) -> Spawn | Await:
    """Return how PROCESS gets started."""
    is_waiting = process in state.awaiting
    return Await(process, state.attempt) if is_waiting else Spawn(process, state.attempt)


def stands(state: State, action: Action) -> bool:
    """Whether ACTION, which waited its turn, is still wanted: signals overtake spawns."""
    if isinstance(action, Gather | StopGathering):
        return state.phase == GATHERING and action.attempt == state.attempt
    return not isinstance(action, Spawn | Await) or (
        state.phase == RUNNING and action.attempt == state.attempt
    )


def step(state: State, event: Event, rules: Rules) -> Step:  # noqa: C901, PLR0911, PLR0912 - one for each event
    """Return the state after EVENT and what is to be done."""
    match event:
        case Refuted():
            return _refuted(state, event, rules)
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
            wanted = state.phase == RUNNING and event.attempt == state.attempt
            is_next = wanted and event.process == state.next_index
            return state, (Spawn(event.process, state.attempt),) if is_next else ()
        case Exited():
            return _exited(state, event, rules)
        case Examined():
            return _examined(state, event, rules)
        case Interrupted():
            return _interrupted(state, event, rules)
        case Elapsed():
            return _elapsed(state, event)
        case Hung():
            return _hung(state, event, rules)
        case PeersDone() | PeerFailed():
            return _heard(state, event, rules)
        case Arbitrated():
            return _arbitrated(state, event, rules)
        case CutOff():
            return _kill(state, event.at) if state.alive else (state, ())
        case _:  # pragma: no cover - there are no others
            return assert_never(event)


def _started(state: State, event: Started) -> Step:
    after = event.process + 1
    state = state._replace(alive=state.alive | {event.process}, next_index=after)
    more = state.phase == RUNNING and after < state.total
    return state, (_next(state, after),) if more else ()


def _exited(state: State, event: Exited, rules: Rules) -> Step:
    state = state._replace(
        alive=state.alive - {event.process},
        owed=state.owed if event.status.exit_code else state.owed - {event.process},
        exits=(*state.exits, event),
    )
    if state.phase == RUNNING and event.status.exit_code:
        # Of any process: ranks would wait for a dead parameter server for ever.
        suspects = event.also_failed | {event.process}
        return _stop(state._replace(cause=event, suspects=suspects), TERM, event.at, rules)
    if state.phase == RUNNING and not state.owed:
        return _stop(state, TERM, event.at, rules)
    if state.phase != RUNNING and not state.alive:
        return _all_dead(state, event.at, rules)
    if state.phase == STOPPING and state.spared:
        spared = state.spared - {event.process}
        deadline = state.deadline if spared else state.kill_at
        return state._replace(spared=spared, deadline=deadline), ()
    return state, ()


def culprit(exits: Sequence[Exited]) -> Exited:
    """Return the one of these failures that came first.

    Who says what only victims say is a victim, if somebody else failed in that time, too.
    """
    return min(exits, key=lambda one: (one.is_victim, _failed_at(one)))


def _failed_at(one: Exited) -> float:
    return one.at if one.failed_at is None else one.failed_at


def _examined(state: State, event: Examined, rules: Rules) -> Step:
    """Put the blame where it belongs, and end, or try again."""
    first = culprit(event.exits)
    if first.process in state.late and first.raised and first.status.signum in {TERM, KILL}:
        # It had failed already when we lost patience with it.
        first = first._replace(status=ExitStatus(code=first.raised))
    state = state._replace(cause=first)
    return _finish(state) if state.alive else _decide(state, event.at, rules)


def _hung(state: State, event: Hung, rules: Rules) -> Step:
    if state.phase == RUNNING:
        return _stop(state._replace(cause=event), TERM, event.at, rules)
    return state, ()


def _heard(state: State, event: PeersDone | PeerFailed, rules: Rules) -> Step:
    """Go on as other hosts want us to."""
    if isinstance(event, PeerFailed):
        return _peer_failed(state, event, rules)
    if event.attempt != state.attempt:
        return state, ()
    state = state._replace(owed=state.owed - {PEERS})
    is_done = state.phase == RUNNING and not state.owed
    return _stop(state, TERM, event.at, rules) if is_done else (state, ())


def _peer_failed(state: State, event: PeerFailed, rules: Rules) -> Step:
    """Fail with the others, and start again with them, if they do."""
    if state.phase == WAITING and event.is_final:
        return _finish(_given_up_for(state, event))
    if state.phase in {STOPPING, KILLING} and event.is_final and state.cause is not None:
        return _not_again(state, event, rules), ()
    # Of an attempt that we have left behind already, only that there is no other one is news.
    if state.phase not in {GATHERING, RUNNING} or not (
        event.is_final or event.attempt >= state.attempt
    ):
        return state, ()
    return _stop(state._replace(cause=event), TERM, event.at, rules)


def _source_failed(state: State, event: SourceFailed, rules: Rules) -> Step:
    """End the job when it cannot do without what EVENT's source tells."""
    if not event.is_required:
        return state, ()
    if event.source == SESSION:
        # Nobody is left with whom anything could be agreed.
        state = state._replace(essential=state.essential - {PEERS}, owed=state.owed - {PEERS})
    if state.phase == ARBITRATING:
        return _finish(state._replace(given_up=f"{event.describe()}."))
    if state.phase == WAITING:
        return _finish(_given_up_for(state, event))
    if state.cause is None:
        return _refuted(state, event, rules)
    return _not_again(state, event, rules), ()


def _not_again(state: State, event: PeerFailed | SourceFailed, rules: Rules) -> State:
    """Let EVENT be why there is no other attempt, if there would have been one."""
    is_open = state.phase in {STOPPING, KILLING} and isinstance(state.cause, Retried)
    if not is_open or state.attempt >= rules.max_restarts:
        return state
    return state._replace(given_up=state.given_up or f"{event.describe()}.")


def _given_up_for(state: State, cause: Interrupted | PeerFailed | SourceFailed) -> State:
    """Put CAUSE over what another attempt was waited for after."""
    assert isinstance(state.cause, Retried)  # noqa: S101 - see _again
    return state._replace(cause=cause, earlier=(*state.earlier, state.cause))


def _refuted(state: State, event: Refuted | SourceFailed, rules: Rules) -> Step:
    """Let it be the verdict, unless something worse has happened already."""
    is_early = isinstance(event, Refuted) and state.phase == GATHERING
    if state.cause is not None or state.phase == WAITING or is_early:
        # What is refuted now has been tried by an earlier attempt.
        return state, ()
    if state.phase in {GATHERING, RUNNING}:
        return _stop(state._replace(cause=event), TERM, event.at, rules)
    state = state._replace(cause=event)
    # What a rank leaves at its very end is judged when it has ended: the last word, but in time.
    return state, (Finish(state.outcome()),) if state.phase == FINISHED else ()


def _stop(state: State, signum: int, at: float, rules: Rules) -> Step:
    """Ask everybody to end."""
    if not state.alive:
        return _all_dead(state, at, rules)
    spared = state.suspects & state.alive
    kill_at = at + rules.grace_s
    deadline = min(at + TEARDOWN_S, at + rules.grace_s / 2) if spared else kill_at
    state = state._replace(phase=STOPPING, deadline=deadline, kill_at=kill_at, spared=spared)
    return state, (SignalAll(signum, spared),)


def _all_dead(state: State, at: float, rules: Rules) -> Step:
    """Finish, or wait a little and try again; first find out who is to blame."""
    examine = _to_examine(state)
    return (state._replace(phase=STOPPING), examine) if examine else _decide(state, at, rules)


def _to_examine(state: State) -> tuple[Examine, ...]:
    """Return the question who failed first, if any process is to blame."""
    if not isinstance(state.cause, Exited) or state.cause.fault:
        return ()
    exits = (one for one in state.exits if one.process in state.suspects)
    return (Examine(tuple(one for one in exits if one.status.exit_code)),)


def _decide(state: State, at: float, rules: Rules) -> Step:
    """Finish, or wait a little and try again."""
    cause = state.cause
    if cause is not None and PEERS in state.essential:
        state = state._replace(phase=ARBITRATING, deadline=None)
        return state, (Arbitrate(state.attempt, cause, _hopeless(state, rules)),)
    if (
        cause is None
        # Another attempt would be no more in effect.
        or isinstance(cause, Interrupted | Refuted | SourceFailed | GatherFailed)
        or state.interrupted is not None
        or state.attempt >= rules.max_restarts
        or (isinstance(cause, Exited) and cause.fault)
        or (isinstance(cause, PeerFailed) and cause.is_final)
    ):
        return _finish(state)
    given_up = state.given_up or _futile((*state.earlier, cause))
    if given_up:
        return _finish(state._replace(given_up=given_up))
    wait = backoff(rules.backoff_s, state.attempt, at)
    return state._replace(phase=WAITING, deadline=at + wait), (Sweep(),)


def _hopeless(state: State, rules: Rules) -> str:
    """Say why no other attempt can help, as far as that can be known on this host."""
    cause = state.cause
    if isinstance(cause, Exited) and cause.fault:
        return cause.fault
    if not isinstance(cause, Retried):
        return "" if cause is None else Outcome(cause).describe()
    if state.interrupted is not None:
        return Outcome(state.interrupted).describe()
    return "" if not rules.max_restarts else _futile((*state.earlier, cause))


def _arbitrated(state: State, event: Arbitrated, rules: Rules) -> Step:
    """End, or begin again, together with all hosts."""
    if event.attempt != state.attempt:
        return state, ()
    if state.phase == WAITING and event.is_final and event.failure is not None:
        return _finish(_given_up_for(state, event.failure))
    if state.phase != ARBITRATING:
        # The others have given us up; what runs here is being stopped or killed.
        return state, ()
    state = state._replace(cause=event.failure or state.cause)
    if event.is_final or not isinstance(state.cause, Retried):
        return _finish(state._replace(given_up=event.given_up if rules.max_restarts else ""))
    if state.interrupted is not None:
        return _finish(_given_up_for(state, state.interrupted))
    wait = backoff(rules.backoff_s, state.attempt, event.at)
    return state._replace(phase=WAITING, deadline=event.at + wait), (Sweep(),)


def backoff(first_s: float, attempt: int, at: float) -> float:
    """Return how long to wait after ATTEMPT: twice as long each time, up to half of it left off.

    The moment of death is the jitter: it is not the same on any two hosts.

    >>> backoff(1.0, 0, 7.0), backoff(1.0, 3, 7.0), backoff(1.0, 30, 7.0)
    (0.5, 4.0, 30.0)
    """
    longest = min(first_s * 2.0 ** min(attempt, 30), LONGEST_WAIT_S)
    return longest * (0.5 + (at * 1000 % 1) / 2)


def _futile(causes: Sequence[Retried]) -> str:
    """Say why another attempt would end as these did; nothing if it may not."""
    last = causes[-1]
    if isinstance(last, Exited) and last.hopeless:
        return last.hopeless
    recent = causes[-SAME_FAILURES:]
    if len(recent) == SAME_FAILURES and all(
        isinstance(one, Exited) and _is_alike(one, last) and not _has_gone_on(recent[0], one)
        for one in recent
    ):
        return f"no progress: it failed the same way {SAME_FAILURES} times without a new step."
    return ""


def _is_alike(one: Exited, other: Retried) -> bool:
    return isinstance(other, Exited) and (one.process, one.status, one.last_words) == (
        other.process,
        other.status,
        other.last_words,
    )


def _has_gone_on(first: Retried, later: Exited) -> bool:
    """Whether LATER got further than FIRST."""
    if later.step is None:
        return later.lived_s >= SOME_PROGRESS_S
    return isinstance(first, Exited) and first.step is not None and later.step > first.step


def _again(state: State, at: float) -> Step:
    """Start everything anew."""
    # Only failures are waited after.
    assert isinstance(state.cause, Retried)  # noqa: S101
    again = State(
        state.patience_s, attempt=state.attempt + 1, earlier=(*state.earlier, state.cause)
    )
    return _gather(again, at)


def _finish(state: State) -> Step:
    state = state._replace(phase=FINISHED, deadline=None)
    return state, (Sweep(), Finish(state.outcome()))


def _interrupted(state: State, event: Interrupted, rules: Rules) -> Step:
    if event.signum in PASSED_ON:
        return state, (SignalAll(event.signum),) if state.alive else ()
    first = state.interrupted
    if first is None:
        state = state._replace(interrupted=event)
        if state.phase == WAITING:
            return _finish(_given_up_for(state, event))
        if state.phase in {GATHERING, RUNNING}:
            return _stop(state._replace(cause=event), event.signum, event.at, rules)
        # Everybody has been asked to end already; a scheduler's TERM to all of us is one request.
        return state, ()
    # A shell that loses its terminal repeats the HUP that the kernel sent.
    same = event.signum == first.signum and event.at - first.at < REPEAT_S
    if state.phase == KILLING or same or event.signum == HUP:
        return state, ()
    # The other hosts are not waited for by who is in such a hurry.
    return _finish(state) if state.phase == ARBITRATING else _kill(state, event.at)


def _elapsed(state: State, event: Elapsed) -> Step:
    if state.deadline is None or event.at < state.deadline:
        return state, ()
    if state.phase == GATHERING:
        return state._replace(deadline=None), (StopGathering(state.attempt),)
    if state.phase == WAITING:
        return _again(state, event.at)
    if state.phase == KILLING:
        examine = _to_examine(state)
        return (state, examine) if examine else _finish(state)
    if state.spared:
        others = state.alive - state.spared
        state = state._replace(spared=frozenset(), late=state.spared, deadline=state.kill_at)
        return state, (SignalAll(TERM, others),)
    return _kill(state, event.at)


def _kill(state: State, at: float) -> Step:
    late = state.late | state.spared
    state = state._replace(phase=KILLING, deadline=at + STUCK_S, spared=frozenset(), late=late)
    return state, (SignalAll(KILL),)
