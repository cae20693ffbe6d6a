"""A member of a session: what each launcher does about the others.

`step(state, event) -> (state, actions)`, pure. The caller performs the actions and feeds the
coordinator's messages, what happens to the ranks here, and TimerExpired at `wake_at`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from fleetrun.errors import RendezvousError
from fleetrun.run.events import Failure, TimerExpired
from fleetrun.run.policy import decide
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.messages import (
    LOST,
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

# Without a generation; awaiting its roster; planning it; ready to start; ranks running, being
# stopped, stopped; the end.
IDLE, JOINING, PLANNING, READY, RUNNING, STOPPING, STOPPED, ENDED = (
    "idle",
    "joining",
    "planning",
    "ready",
    "running",
    "stopping",
    "stopped",
    "ended",
)


class Connected(NamedTuple):
    """A connection to the coordinator is open."""

    at: float


class Disconnected(NamedTuple):
    """The connection is lost."""

    at: float


class Gone(NamedTuple):
    """The coordinator is lost or replaced; WHY: there will be no other."""

    at: float
    why: str = ""


class Heard(NamedTuple):
    """A message from the coordinator."""

    message: FromCoordinator
    at: float


class JoinRequested(NamedTuple):
    """The host asks to join the next generation, or reports by FAILURE why it cannot."""

    request: JoinRequest
    at: float
    failure: Failure | None = None


_OfRanks: TypeAlias = HostReady | Done | Failed | Stopped


class Said(NamedTuple):
    """The launcher reports on its ranks, or that it leaves.

    A generation that cannot be planned counts as stopped, with the reason.
    """

    message: _OfRanks | Leave
    at: float


class SendToCoordinator(NamedTuple):
    """Send a message to the coordinator."""

    message: FromMember


class Redial(NamedTuple):
    """Drop the connection, if there is one, and reconnect."""


class Deliver(NamedTuple):
    """Pass an order of the coordinator to the launcher.

    RosterMessage: plan the generation; Start: start the ranks; Stop: stop them; Verdict: how the
    generation has ended; Missing: who is waited for.
    """

    message: RosterMessage | Start | Stop | Verdict | Missing


class Fence(NamedTuple):
    """Kill all ranks now: the others may start again without them."""

    failure: Failure


class KillAt(NamedTuple):
    """Kill all ranks at AT unless a later KillAt comes first, as this launcher may be stopped.

    The guard does it, which does not depend on this launcher. None: never, nobody waits for it.
    """

    at: float | None


Event: TypeAlias = Connected | Disconnected | Gone | Heard | TimerExpired | JoinRequested | Said
Action: TypeAlias = SendToCoordinator | Redial | Deliver | Fence | KillAt


class MemberState(NamedTuple):
    """The state of this launcher."""

    config: RendezvousConfig
    launcher: str
    # The host at which the coordinator is, for people.
    coordinator: str
    # Whether the coordinator is in this launcher, so that it is neither lost nor slow.
    is_local: bool
    wake_at: float
    phase: str = IDLE
    generation: int = 0
    # That of the last roster.
    session: str = ""
    request: JoinRequest | None = None
    is_connected: bool = False
    # When the connection broke, while there is no other.
    broken_at: float | None = None
    # When the last acknowledged heartbeat was sent; the number of the last one, and the
    # unacknowledged ones with their times.
    alive_at: float = 0.0
    number: int = 0
    unanswered: tuple[tuple[int, float], ...] = ()
    is_done: bool = False
    # How often the job had failed when this generation began, and whether this is the only host.
    restarts: int = 0
    is_alone: bool = False
    # The job runs without this launcher, which waits for a place.
    stands_by: bool = False
    # The failure here.
    failure: Failure | None = None
    # A verdict that waits until the ranks have stopped; `is_own`: this launcher's own, which the
    # coordinator's may still replace.
    verdict: Verdict | None = None
    is_own: bool = False
    is_fenced: bool = False
    # How long this launcher, or its host, was stopped, if that was long.
    stood_still_s: float = 0.0

    @property
    def is_new(self) -> bool:
        """Whether it waits for its first generation."""
        return self.phase in {IDLE, JOINING} and not self.generation and not self.stands_by


Step: TypeAlias = tuple[MemberState, tuple[Action, ...]]


def begin(
    config: RendezvousConfig,
    launcher: str,
    coordinator: str,
    at: float,
    *,
    is_local: bool,
) -> MemberState:
    """Return the state of a launcher that has no connection yet."""
    wake_at = at + config.heartbeat_s
    return MemberState(config, launcher, coordinator, is_local, wake_at, alive_at=at)


def step(state: MemberState, event: Event) -> Step:  # noqa: PLR0911 - one for each event
    """Return the state after EVENT, and what is to be done."""
    if state.phase == ENDED:
        return state, ()
    late_s = event.at - state.wake_at
    if late_s > state.config.heartbeat_timeout_s / 2:
        state = state._replace(stood_still_s=max(late_s, state.stood_still_s))
    match event:
        case Connected(at=at):
            return _connected(state, at)
        case Disconnected(at=at):
            return _disconnected(state, at)
        case Gone(at=at, why=why):
            return _gone(state, at, why)
        case Heard(message=message, at=at):
            return _heard(state, message, at)
        case TimerExpired(at=at):
            return _elapsed(state, at)
        case JoinRequested(request=request, failure=failure):
            state = state._replace(phase=JOINING, request=request, failure=failure)
            return _say(state, _join(state, state.generation, request))
        case Said(message=message, at=at):
            return _reported(state, message, at)


def _say(state: MemberState, message: FromMember, *more: Action) -> Step:
    """Send MESSAGE now; without a connection, _connected sends it on the next one."""
    sent = (SendToCoordinator(message),) if state.is_connected else ()
    return state, (*sent, *more)


def last_words(state: MemberState, failure: Failure | None) -> tuple[FromMember, ...]:
    """Return the messages for a connection that is made after this launcher has left."""
    if state.request is None or state.phase != JOINING:
        return ()
    return _join(state, state.generation, state.request), Leave(failure)


def _join(state: MemberState, generation: int, request: JoinRequest) -> Join:
    failure = state.failure if state.phase == JOINING else None
    return Join(PROTOCOL, state.launcher, generation, request, state.session, failure)


# The connection -------------------------------------------------------------------------------


def _connected(state: MemberState, at: float) -> Step:
    """Join, and send everything that the coordinator may not have received."""
    state = state._replace(is_connected=True, broken_at=None, unanswered=(), wake_at=at)
    if state.request is None:
        return state, ()
    # While idle, the next request is not known yet.
    generation = state.generation - (state.phase == IDLE)
    owed: list[FromMember] = [_join(state, generation, state.request)]
    if state.phase in {READY, RUNNING, STOPPING}:
        owed.append(HostReady(state.generation))
    if state.is_done:
        owed.append(Done(state.generation))
    if state.phase == STOPPED:
        owed.append(Stopped(state.generation, state.failure))
    elif state.failure is not None and state.phase != JOINING:
        owed.append(Failed(state.generation, state.failure))
    return state, tuple(map(SendToCoordinator, owed))


def _disconnected(state: MemberState, at: float) -> Step:
    broken_at = at if state.broken_at is None else state.broken_at
    state = state._replace(is_connected=False, broken_at=broken_at, unanswered=())
    state = state._replace(wake_at=min(state.wake_at, at + state.config.rejoin_s))
    return state, (Redial(),)


def _gone(state: MemberState, at: float, why: str) -> Step:
    """Go on to the next generation under another coordinator, or end."""
    # Long enough ago, whatever rounding loses.
    broken_at = at - 2 * state.config.rejoin_s
    state = state._replace(is_connected=False, unanswered=(), broken_at=broken_at)
    if why:
        return _end_for(state, Failure(state.coordinator, why, LOST))
    state, actions = _watch(state, at)
    return (state if state.phase == ENDED else _set_timer(state, at)), actions


def _elapsed(state: MemberState, at: float) -> Step:
    """Send a heartbeat, and check that the coordinator answers."""
    if state.is_local:
        state = state._replace(wake_at=at + state.config.heartbeat_s)
        if _were_killed(state, at):
            return _give_up(state, is_gone=False) if state.phase == RUNNING else (state, ())
        state = state._replace(alive_at=at)
        return state, _kill_later(state)
    state, lost = _watch(state, at)
    state, sent = _beat(state, at)
    return _set_timer(state, at), (*lost, *sent)


def _patience_s(state: MemberState) -> float:
    """Return how long a heartbeat may remain unanswered before this launcher reconnects."""
    # When thousands of hosts join at once, the coordinator is busy for seconds, and more callers
    # would not help. Nothing runs yet.
    is_first = state.phase == JOINING and not state.generation
    return state.config.heartbeat_timeout_s if is_first else state.config.unanswered_s


def _beat(state: MemberState, at: float) -> Step:
    """Send a heartbeat, or reconnect if none is answered."""
    config = state.config
    if not state.is_connected or state.request is None or state.phase == ENDED:
        return state, ()
    if state.unanswered and at >= state.unanswered[0][1] + _patience_s(state):
        parting = SendToCoordinator(Redialing(state.generation))
        return state._replace(is_connected=False, unanswered=()), (parting, Redial())
    if state.unanswered and at < state.unanswered[-1][1] + config.heartbeat_s:
        return state, ()
    if not state.unanswered and at < state.alive_at + config.heartbeat_s and state.number:
        return state, ()
    number = state.number + 1
    state = state._replace(number=number, unanswered=(*state.unanswered, (number, at)))
    return state, (SendToCoordinator(Heartbeat(number)),)


def _watch(state: MemberState, at: float) -> Step:
    """Act when the coordinator has been silent for too long."""
    config = state.config
    if state.is_new or (config.has_store and state.phase in {IDLE, JOINING}):
        # The rendezvous has a timeout of its own; another coordinator may be found.
        return state, ()
    silence = at - state.alive_at
    is_gone = state.broken_at is not None and at >= state.broken_at + config.rejoin_s
    if state.phase in {RUNNING, STOPPING}:
        actions: tuple[Action, ...] = ()
        if (is_gone or silence >= config.warning_s) and state.verdict is None:
            state, actions = _give_up(state, is_gone=is_gone)
        if silence >= config.fence_s and not state.is_fenced:
            state = state._replace(is_fenced=True)
            actions = (*actions, Fence(_loss(state, is_gone=is_gone)))
        return state, actions
    if is_gone or silence >= config.heartbeat_timeout_s:
        return _give_up(state, is_gone=is_gone)
    return state, ()


def _give_up(state: MemberState, *, is_gone: bool) -> Step:
    """End without the coordinator."""
    failure = _loss(state, is_gone=is_gone)
    goes_on = state.config.has_store and not _is_last(state, failure)
    verdict = Verdict(state.generation, "", failure, is_final=not goes_on)
    if state.phase == RUNNING:
        # The coordinator's verdict may still come; if not, this one counts.
        state = state._replace(phase=STOPPING, failure=failure, verdict=verdict, is_own=True)
        return _say(
            state, Failed(state.generation, failure), Deliver(Stop(state.generation, failure))
        )
    if state.phase == STOPPING:
        return state._replace(verdict=verdict, is_own=True), ()
    own_failure = state.failure
    if own_failure is not None and not own_failure.is_victim:
        goes_on = goes_on and not _is_last(state, own_failure)
        given_up = "" if goes_on else failure.what
        verdict = Verdict(state.generation, state.launcher, own_failure, not goes_on, given_up)
    return _conclude(state, verdict)


def _is_last(state: MemberState, failure: Failure) -> bool:
    most = state.config.max_restarts
    is_departure = failure.is_departure
    return decide(failure.no_retry, state.restarts, most, is_departure=is_departure).is_final


def _loss(state: MemberState, *, is_gone: bool) -> Failure:
    """Return the failure that the coordinator and this launcher have lost each other."""
    where = state.request.hostname if state.request is not None else ""
    if state.stood_still_s:
        what = _stood_still(state)
    elif is_gone:
        where, what = state.coordinator, "the coordinator of the job was lost"
    else:
        what = f"fleetrun was cut off from the coordinator ({state.coordinator})"
    # A victim, as a rank that loses a peer: a failure of its own on any host is the cause. An
    # elastic job that hears of it goes on, even with this host.
    is_victim, may_change = not state.is_local, state.config.may_change
    return Failure(where, what, LOST, is_victim=is_victim, is_departure=may_change)


def _stood_still(state: MemberState) -> str:
    """Return the text for a launcher that was stopped for so long that it counts as lost."""
    return (
        f"fleetrun, which was not running for {state.stood_still_s:.0f} s (stopped, or without a "
        "processor), is considered lost"
    )


def _set_timer(state: MemberState, at: float) -> MemberState:
    """Set when TimerExpired is due."""
    config = state.config
    due = [at + config.heartbeat_s]
    if state.unanswered:
        due += [state.unanswered[-1][1] + config.heartbeat_s]
        due += [state.unanswered[0][1] + _patience_s(state)]
    else:
        due += [state.alive_at + config.heartbeat_s]
    due += [state.alive_at + after for after in (config.warning_s, config.fence_s)]
    due += [state.alive_at + config.heartbeat_timeout_s]
    if state.broken_at is not None:
        due.append(state.broken_at + config.rejoin_s)
    return state._replace(wake_at=min(moment for moment in due if moment > at))


# What the coordinator says --------------------------------------------------------------------


def _heard(state: MemberState, message: FromCoordinator, at: float) -> Step:  # noqa: PLR0911 - one for each message
    match message:
        case Acknowledged(number=number):
            return _acknowledged(state, number, at)
        case Missing(stands_by=stands_by, config=config):
            state = _obey(state, config, at)
            return _missing(state, message, at) if stands_by else (state, (Deliver(message),))
        case Refused(why=why):
            return _refused(state, why)
        case Verdict():
            return _judged(state, message)
        case RosterMessage() if state.phase == JOINING and message.generation >= state.generation:
            # It answers our Join; a newcomer's first generation may be a later one.
            state = _obey(state, message.config, at)._replace(
                phase=PLANNING,
                generation=message.generation,
                restarts=message.restarts,
                is_alone=len(message.entries) == 1,
                session=message.session,
                stands_by=False,
                alive_at=max(state.alive_at, at),
                # Their answers wait behind everybody's rosters.
                unanswered=(),
            )
            return state, (Deliver(message),)
        case RosterMessage() | Start() | Stop() if message.generation != state.generation:
            return state, ()
        case Start() if state.phase == READY:
            return _run(state, at)
        case Stop() if state.phase == RUNNING:
            return state._replace(phase=STOPPING), (Deliver(message),)
        case Stop() if state.phase in {PLANNING, READY}:
            # Nothing runs here yet.
            state = state._replace(phase=STOPPED)
            return _say(state, Stopped(state.generation, None))
        case _:
            return state, ()


def _run(state: MemberState, at: float) -> Step:
    if not state.is_local and at - state.alive_at >= state.config.heartbeat_timeout_s:
        # This launcher was stopped meanwhile; the others may run a later generation by now.
        return _give_up(state, is_gone=False)
    state = state._replace(phase=RUNNING)
    if state.is_local:
        state = state._replace(alive_at=at, wake_at=at, stood_still_s=0.0)
    return state, (*_kill_later(state), Deliver(Start(state.generation)))


def _obey(state: MemberState, config: RendezvousConfig, at: float) -> MemberState:
    """Adopt the job's CONFIG."""
    if state.is_local or config == state.config:
        return state
    return state._replace(config=config, wake_at=min(state.wake_at, at))


def _missing(state: MemberState, message: Missing, at: float) -> Step:
    """Wait for a place as long as the coordinator is there."""
    if state.phase != JOINING:
        return state, ()
    if not state.stands_by:
        state = state._replace(stands_by=True, alive_at=max(state.alive_at, at))
    return _set_timer(state, at), (Deliver(message),)


def _acknowledged(state: MemberState, number: int, at: float) -> Step:
    sent = [sent_at for beat_number, sent_at in state.unanswered if beat_number == number]
    if not sent:
        return state, ()
    later = tuple(beat for beat in state.unanswered if beat[0] > number)
    alive_at = max(state.alive_at, sent[0])
    state = state._replace(alive_at=alive_at, unanswered=later, stood_still_s=0.0)
    return _set_timer(state, at), _kill_later(state)


def _kill_later(state: MemberState) -> tuple[Action, ...]:
    """Postpone the moment when the guard kills the ranks of a launcher that is stopped."""
    if state.phase not in {RUNNING, STOPPING} or _keeps_a_lease(state):
        return ()
    is_missed = not (state.is_local and state.is_alone)
    return (KillAt(state.alive_at + state.config.guard_s if is_missed else None),)


def _keeps_a_lease(state: MemberState) -> bool:
    """Whether its lease in the store decides how long its ranks may run."""
    return state.is_local and state.config.has_store and state.config.starts_again


def _refused(state: MemberState, why: str) -> Step:
    """End: the coordinator has refused this launcher."""
    is_early = state.phase in {IDLE, JOINING}
    code = RendezvousError.exit_code if is_early else LOST
    what = f"the coordinator refused this host: {why}"
    failure = Failure(state.coordinator, what, code, is_victim=not is_early)
    if state.stood_still_s and not is_early:
        failure = _loss(state, is_gone=False)
    return _end_for(state, failure)


def _end_for(state: MemberState, failure: Failure) -> Step:
    """End this launcher alone because of FAILURE, after its ranks have stopped."""
    return _take(state, Verdict(state.generation, "", failure, is_final=True))


def _judged(state: MemberState, verdict: Verdict) -> Step:
    """Take the coordinator's VERDICT if it concerns this launcher."""
    # The end of a generation without this launcher matters only if it was the last.
    is_over = state.phase == JOINING and verdict.is_final
    if verdict.generation != state.generation and not (
        is_over and verdict.generation > state.generation
    ):
        return state, ()
    return _take(state, verdict)


def _take(state: MemberState, verdict: Verdict) -> Step:
    """Take VERDICT, after the ranks have stopped."""
    if verdict.failure is not None and state.phase == RUNNING:
        state = state._replace(phase=STOPPING, verdict=verdict, is_own=False)
        return state, (Deliver(Stop(state.generation, verdict.failure)),)
    if state.phase == STOPPING:
        return state._replace(verdict=verdict, is_own=False), ()
    return _conclude(state, verdict)


def _conclude(state: MemberState, verdict: Verdict) -> Step:
    if verdict.is_final:
        return state._replace(phase=ENDED, verdict=verdict), (Deliver(verdict),)
    state = state._replace(
        phase=IDLE,
        generation=state.generation + 1,
        is_done=False,
        failure=None,
        verdict=None,
        is_own=False,
        is_fenced=False,
    )
    return state, (Deliver(verdict),)


# What becomes of the ranks --------------------------------------------------------------------


def _reported(state: MemberState, message: _OfRanks | Leave, at: float) -> Step:  # noqa: PLR0911 - one for each message
    if isinstance(message, Leave):
        return state._replace(phase=ENDED), (SendToCoordinator(message),)
    if message.generation != state.generation:
        return state, ()
    match message:
        case HostReady() if state.phase == PLANNING:
            return _say(state._replace(phase=READY), message)
        case Done() if state.phase == RUNNING and not state.is_done:
            return _say(state._replace(is_done=True), message)
        case Failed(failure=failure) if state.phase == RUNNING:
            if _were_killed(state, at):
                return _give_up(state, is_gone=False)
            return _say(state._replace(phase=STOPPING, failure=failure), message)
        case Stopped(failure=failure) if state.phase == PLANNING:
            return _say(state._replace(phase=STOPPED, failure=failure), message)
        case Stopped(failure=failure) if state.phase in {RUNNING, STOPPING}:
            return _stopped(state, failure, at)
        case _:
            return state, ()


def _were_killed(state: MemberState, at: float) -> bool:
    """Whether the guard has killed the ranks because this launcher was stopped, see KillAt."""
    is_guarded = not (_keeps_a_lease(state) or (state.is_local and state.is_alone))
    is_late = bool(state.stood_still_s) and at >= state.alive_at + state.config.guard_s
    return is_guarded and is_late


def _stopped(state: MemberState, failure: Failure | None, at: float) -> Step:
    """Report that no rank runs here any more; the verdict follows."""
    # Exits of ranks that were killed or stopped for that reason say nothing.
    if failure is not None and _were_killed(state, at):
        failure = state.failure or _loss(state, is_gone=False)
    elif failure is None or (state.is_own and state.stood_still_s):
        failure = state.failure
    state = state._replace(phase=STOPPED, failure=failure, wake_at=at)
    state, actions = _say(state, Stopped(state.generation, state.failure))
    if state.verdict is None or state.is_own:
        # Wait for the coordinator's, if it can be reached; else _watch concludes.
        return state, actions
    state, more = _conclude(state, state.verdict)
    return state, (*actions, *more)
