"""The coordinator of a session: keeps the roster, and decides how the job ends on all hosts.

`step(state, event) -> (state, actions)`, pure. The caller performs the actions and feeds every
message of a member, every broken connection, and TimerExpired at `wake_at`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleetrun.errors import RendezvousError
from fleetrun.run.events import Failure, TimerExpired
from fleetrun.run.policy import decide
from fleetrun.session import admission, rank_assignment
from fleetrun.session.admission import Objection
from fleetrun.session.config import PREPARE_S, RendezvousConfig
from fleetrun.session.messages import (
    LOST,
    PROTOCOL,
    Acknowledged,
    Done,
    Entry,
    Failed,
    FromCoordinator,
    Heartbeat,
    HostReady,
    Join,
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
from fleetrun.session.rank_assignment import Host
from fleetrun.session.state import (
    ENDED,
    FORMING,
    PREPARING,
    RUNNING,
    STOPPING,
    Action,
    Broken,
    Close,
    Event,
    Received,
    Report,
    Send,
    State,
    Step,
    caller,
    to_hosts,
    to_placed,
    with_host,
    without_connection,
    without_host,
)

# How often hosts are told who is missing, at most.
_REMARK_S = 1.0
# Added to a fault that an unproven host reports.
_LONGEST_FAULT = 400


def step(state: State, event: Event) -> Step:
    """Return the state after EVENT, and the actions to perform."""
    match event:
        case Received(message=Join()):
            return _join(state, event)
        case Received(message=LauncherKilled()):
            return _killed(state, event)
        case Received():
            return _received(state, event)
        case Broken(connection=connection, at=at):
            return _broken(state, connection, at)
        case TimerExpired(at=at):
            return _look(state, at)


# Joining --------------------------------------------------------------------------------------


def _join(state: State, event: Received) -> Step:  # noqa: PLR0911 - one for each case
    """Admit a launcher, or its new connection, or refuse it."""
    join = event.message
    assert isinstance(join, Join)
    known = state.hosts.get(join.launcher)
    if known is not None and join.failure is None and not admission.doubt(state, event, join):
        return _rejoin(state, event, join, known)
    if _may_return(state, join):
        lost = dict(state.lost)
        has_place = join.launcher in state.placed
        back = lost.pop(join.launcher)._replace(connection=None, has_place=has_place)
        return _rejoin(state._replace(lost=lost), event, join, back)
    doubt = admission.doubt(state, event, join)
    if doubt is not None:
        return admission.refuse(state, event, doubt)
    objection = admission.objection(state, event, join)
    ended = state.verdict if objection == admission.OVER else None
    if ended is not None and ended.failure is not None:
        late = ended._replace(generation=join.generation)
        state = state._replace(heard_end=state.heard_end | {join.launcher})
        return state, (Send((event.connection,), late), Close(event.connection))
    if join.failure is not None and state.phase != ENDED:
        return _troubled(state, event, join.failure)
    if objection is not None:
        return _refuse(state, event, objection)
    host = Host(
        join.launcher,
        join.request,
        event.address,
        event.is_local,
        event.connection,
        event.at,
        event.at,
    )
    return _admit(state, event, host)


def _troubled(state: State, event: Received, failure: Failure) -> Step:
    """Go on without a launcher whose host has a fault, or end the job with its FAILURE."""
    join = event.message
    assert isinstance(join, Join)
    known = state.hosts.get(join.launcher)
    is_awaited = state.phase == FORMING and (known is not None or not state.generation)
    if is_awaited and (event.is_local or not state.config.may_change):
        ended = Verdict(state.generation, join.launcher, failure, is_final=True)
        state, actions = _end(state, ended, event.at)
        state = state._replace(heard_end=state.heard_end | {join.launcher})
        notice = () if known is not None else (Send((event.connection,), ended),)
        return state, (*actions, *notice, Close(event.connection))
    if known is not None:
        state = without_host(state, known)
    objection = admission.Objection(failure.what[:_LONGEST_FAULT])
    state, refused = admission.refuse(state, event, objection)
    state, actions = _form(state, event.at)
    return state, (*refused, *actions)


def _may_return(state: State, join: Join) -> bool:
    """Whether a launcher that was only slow, not lost, may hear how the job ends."""
    if join.launcher not in state.lost:
        return False
    is_current = join.generation == state.generation
    return state.phase == STOPPING and is_current and not state.config.may_change


def _admit(state: State, event: Received, host: Host) -> Step:
    """Admit HOST, whose launcher is new and matches the job."""
    holder = admission.holder_of(state, host.request.rank)
    if holder is not None and holder.connection is not None:
        return _two_of_one_rank(state, event, host, holder)
    lost: tuple[Action, ...] = ()
    if holder is not None:
        # It was killed and started again.
        state, lost = _lost(state, holder, event.at)
        if state.phase == ENDED:
            state, rejoining = _join(state, event)
            return state, (*lost, *rejoining)
    host = host._replace(failure_count=state.failure_counts.get(_where(host), 0))
    state = with_host(state, host)._replace(own=state.own or ("" if event.is_local else event.own))
    if event.is_local:
        state, parted = _part(state, event)
        lost = (*lost, *parted)
    if state.phase == FORMING:
        newcomers = state.hosts.values() if event.is_local else (host,)
        lost = (*lost, *_note_differences(state, newcomers, event.at))
    state, actions = _form(state, event.at)
    if state.phase == FORMING:
        waiting = Send((event.connection,), _awaited(state, state.remarks, event.at))
        return state, (*lost, waiting, *actions)
    placed = state.hosts.get(host.launcher)
    if placed is None or not placed.has_place:
        actions = (*actions, _stand_by(state, (event.connection,)))
    return state, (*lost, *actions)


def _part(state: State, event: Received) -> Step:
    """Refuse launchers that joined before the coordinator's own and differ from it."""
    actions: list[Action] = []
    for host in [
        host_ for host_ in state.hosts.values() if not host_.is_local and host_.request.ports
    ]:
        join = Join(PROTOCOL, host.launcher, state.generation, host.request)
        early = Received(host.connection or 0, join, event.at, host.address)
        objection = admission.unlike(state, join)
        if objection is not None:
            state, refused = admission.refuse(without_host(state, host), early, objection)
            actions += refused if host.connection is not None else ()
    return state, tuple(actions)


def _where(host: Host) -> tuple[str, str]:
    """Return the name of a host that outlives its launcher."""
    return host.address, host.request.hostname


def _refuse(state: State, event: Received, objection: Objection) -> Step:
    """Refuse a launcher, and end the job if no other launcher can replace it."""
    join = event.message
    assert isinstance(join, Join)
    misfits = admission.misfit(state, join)
    is_awaited = admission.is_awaited(state, event.address) or (
        admission.is_of_this_job(state, join, misfits)
    )
    ends_job = is_awaited and bool(misfits) and not state.config.may_change
    if rank_assignment.ORDER in misfits and state.phase == FORMING and not state.generation:
        # It coordinates the job as well, and some hosts wait for it.
        ends_job = True
    state, actions = admission.refuse(state, event, objection, ends_job=ends_job)
    if not ends_job:
        return state, actions
    state, more = _rendezvous_failed(state, admission.line(event, objection.why), event.at)
    return state, (*actions, *more)


def _two_of_one_rank(state: State, event: Received, host: Host, holder: Host) -> Step:
    """End the job: two hosts claim the same rank, and nobody knows which one is right."""
    rivals = f"{holder.name}, pid {holder.request.pid}, and {host.name}, pid {host.request.pid}"
    what = f"two launchers have rank {host.request.rank}: {rivals}"
    state, actions = _rendezvous_failed(state, what, event.at)
    assert state.verdict is not None
    return state, (*actions, Send((event.connection,), state.verdict), Close(event.connection))


def _rejoin(state: State, event: Received, join: Join, host: Host) -> Step:
    """Take up a launcher's new connection, or its part in the next generation."""
    actions: list[Action] = []
    if host.connection not in {None, event.connection}:
        assert host.connection is not None
        state = without_connection(state, host.connection)
        actions.append(Close(host.connection))
    is_next = state.phase == FORMING and join.generation == state.generation
    host = host._replace(
        connection=event.connection,
        # These are unknown for hosts that joined an earlier coordinator.
        address=host.address or event.address,
        heard_at=event.at,
        broken_at=None,
        is_redialing=False,
        is_joined=host.is_joined or is_next,
        request=join.request if is_next else host.request,
    )
    own = "" if event.is_local else event.own
    state = with_host(state, host)._replace(own=state.own or own)
    actions += [Send((event.connection,), message) for message in _owed(state, host, event)]
    state, more = _form(state, event.at)
    return state, (*actions, *more)


def _owed(state: State, host: Host, event: Received) -> list[FromCoordinator]:
    """Return the messages that HOST, which has joined again by EVENT, may have missed."""
    verdict = state.verdict
    # Hosts that came later were never in the generation that ended.
    was_there = verdict is not None and 0 <= host.since <= verdict.generation
    join = event.message
    is_behind = was_there and isinstance(join, Join) and join.generation < state.generation
    if state.phase == FORMING:
        missing = _awaited(state, state.remarks, event.at)
        return [verdict] if is_behind and verdict is not None else [missing]
    if state.phase == ENDED or not host.has_place:
        return [] if state.phase != ENDED or verdict is None else [verdict]
    owed: list[FromCoordinator] = []
    if is_behind and verdict is not None:
        owed.append(verdict)
    if state.roster is not None:
        owed.append(state.roster)
    if state.phase == RUNNING:
        owed.append(Start(state.generation))
    if state.stop is not None:
        owed.append(state.stop)
    return owed


# The roster -----------------------------------------------------------------------------------


def _form(state: State, at: float) -> Step:
    """Form the roster once all hosts are there."""
    if state.phase != FORMING or at < state.not_before:
        return state, ()
    if not _is_complete(state, at):
        return _wait_for_more(state, at), ()
    config = state.config
    before = 0 if state.generation == 0 else 1 + max(h.order for h in state.hosts.values())
    present = state.here
    excluded = (
        rank_assignment.left_out(present, config.least, config.most) if config.may_change else {}
    )
    suited = [host for host in present if host.launcher not in excluded]
    chosen = rank_assignment.assigned(suited, config.most, before)
    named = tuple(
        f"{state.hosts[launcher].name} stays out: {why}" for launcher, why in excluded.items()
    )
    hosts = {host.launcher: host._replace(has_place=False) for host in state.hosts.values()}
    for launcher in excluded:
        # As though it had never had a place.
        hosts[launcher] = hosts[launcher]._replace(order=-1, since=-1)
    for order, host in enumerate(chosen):
        since = state.generation if host.since < 0 else host.since
        hosts[host.launcher] = host._replace(order=order, since=since, has_place=True)
    entries = tuple(_entry(state, host) for host in chosen)
    remarks = (*state.remarks, *named)
    roster = RosterMessage(
        state.generation, state.restarts, entries, config.told, remarks, state.session
    )
    state = state._replace(
        phase=PREPARING,
        hosts=hosts,
        roster=roster,
        placed=tuple(host.launcher for host in chosen),
        left_out=frozenset(excluded),
        deadline=at + PREPARE_S,
        timeout_s=PREPARE_S,
    )
    actions: list[Action] = [to_placed(state, roster)]
    others = [host for host in hosts.values() if not host.has_place]
    if config.may_change and others:
        connections = [host.connection for host in others if host.connection is not None]
        actions.append(_stand_by(state, connections, named))
    if not config.may_change:
        # A host that was counted twice: its connection broke, and it came back as another one.
        for host in others:
            state = without_host(state, host)
            if host.connection is not None:
                actions += [
                    Send((host.connection,), Refused("all hosts of the job are there")),
                    Close(host.connection),
                ]
    return state, tuple(actions)


def _wait_for_more(state: State, at: float) -> State:
    """Begin to wait for new hosts once all remaining ones are back and too few."""
    config = state.config
    if not config.may_change or not state.generation or state.is_short:
        return state
    if len(state.here) < len(state.hosts):
        return state
    wait_s = config.elastic_timeout_s
    return state._replace(is_short=True, deadline=at + wait_s, timeout_s=wait_s)


def _is_complete(state: State, at: float) -> bool:
    here, config = len(state.here), state.config
    if here < len(state.hosts) and state.generation:
        # Survivors are still stopping; lost ones will soon count as lost.
        return False
    if here >= config.most:
        return True
    if here < config.least:
        return False
    # Hosts that have trained together go on at once.
    return state.generation > 0 or at >= _enough_at(state)


def _enough_at(state: State) -> float:
    """Return when an elastic job first starts without more hosts."""
    newest = max(host.joined_at for host in state.here)
    return min(newest + state.config.elastic_timeout_s, state.deadline)


def _awaited(state: State, remarks: tuple[str, ...], at: float) -> Missing:
    """Return who is awaited, and for how much longer."""
    awaited, until, limit = _missing(state), state.deadline, "--rdzv_timeout"
    has_enough = state.config.least <= len(state.here)
    if state.phase == PREPARING:
        limit = ""
    elif has_enough and at < state.not_before:
        until, limit = state.not_before, "--heartbeat_timeout"
    elif has_enough and not state.generation:
        until, limit = _enough_at(state), "--elastic_timeout"
    elif state.is_short:
        limit = "--elastic_timeout"
    return Missing(awaited, state.config.told, remarks, limit=limit, left_s=max(0.0, until - at))


def _stand_by(state: State, connections: Sequence[int], named: tuple[str, ...] = ()) -> Send:
    """Tell launchers that the job runs without them for now, with remarks NAMED."""
    running = [state.hosts[launcher].name for launcher in state.placed if launcher in state.hosts]
    awaited = f"a place in the job, which runs on {rank_assignment.listed(running)}"
    remarks = (*state.remarks, *named)
    return Send(tuple(connections), Missing(awaited, state.config.told, remarks, stands_by=True))


def _entry(state: State, host: Host) -> Entry:
    request = host.request
    observed = (state.own or host.address) if host.is_local else host.address
    name = request.host or observed or request.hostname
    return Entry(
        host.launcher,
        name,
        request.hostname,
        request.ports,
        request.groups,
        request.master_port,
        request.attempt,
        request.checkpoints,
    )


def _missing(state: State) -> str:
    if state.phase == PREPARING:
        late = [
            state.hosts[launcher].name
            for launcher in state.placed
            if not state.hosts[launcher].is_ready
        ]
        return f"{rank_assignment.listed(late)} to get ready"
    return rank_assignment.missing(state.config, state.here)


def _note_differences(state: State, hosts: Iterable[Host], at: float) -> list[Send]:
    """Tell HOSTS how their optional settings differ from the coordinator's host."""
    local = next((host_ for host_ in state.hosts.values() if host_.is_local), None)
    if local is None:
        return []
    sends = []
    for host in hosts:
        remarks_ = rank_assignment.remarks(
            local.request, host.request, where=local.request.hostname
        )
        if remarks_ and host.connection is not None:
            remarks = tuple(f"{host.name}: {remark}" for remark in remarks_)
            sends.append(Send((host.connection,), _awaited(state, remarks, at)))
    return sends


# While it runs --------------------------------------------------------------------------------


def _received(state: State, event: Received) -> Step:
    """Handle a message of a member."""
    host = caller(state, event.connection)
    if host is None:
        return state, ()
    is_redialing = isinstance(event.message, Redialing)
    host = host._replace(heard_at=event.at, is_redialing=is_redialing)
    state = with_host(state, host)
    match event.message:
        case Heartbeat(number=number):
            return state, (Send((event.connection,), Acknowledged(number)),)
        case Leave(failure=failure):
            return _left(state, host, failure, event.at)
        case Redialing() | Join() | LauncherKilled():
            return state, ()
        case message:
            is_current = message.generation == state.generation
            if is_current and host.has_place:
                return _reported(state, host, message, event.at)
            return state, ()


def _reported(
    state: State, host: Host, message: HostReady | Done | Failed | Stopped, at: float
) -> Step:
    """Handle what a host of the roster reports about this generation."""
    match message:
        case HostReady() if state.phase == PREPARING:
            return _ready(with_host(state, host._replace(is_ready=True)))
        case Done() if state.phase == RUNNING:
            return _done(with_host(state, host._replace(is_done=True)), at)
        case Failed(failure=failure):
            return _failed(state, host.launcher, failure, at)
        case Stopped(failure=failure):
            return _stopped(state, host, failure, at)
        case _:
            return state, ()


def _ready(state: State) -> Step:
    if not all(host is not None and host.is_ready for host in map(state.hosts.get, state.placed)):
        return state, ()
    state = state._replace(phase=RUNNING)
    return state, (to_placed(state, Start(state.generation)),)


def _done(state: State, at: float) -> Step:
    if not all(host is not None and host.is_done for host in map(state.hosts.get, state.placed)):
        return state, ()
    return _end(state, Verdict(state.generation, "", None, is_final=True), at)


def _failed(state: State, launcher: str, failure: Failure, at: float) -> Step:
    """Note a failure; the first one stops all ranks everywhere."""
    if state.phase not in {PREPARING, RUNNING, STOPPING}:
        return state, ()
    if launcher in state.reports:
        return state, ()
    reports = {**state.reports, launcher: Report(at, launcher, failure)}
    state = state._replace(reports=reports)
    if state.phase == STOPPING:
        return state, ()
    stop = Stop(state.generation, failure)
    state = state._replace(phase=STOPPING, stop=stop)
    return state, (to_placed(state, stop),)


def _stopped(state: State, host: Host, failure: Failure | None, at: float) -> Step:
    """Note that nothing runs on HOST any more; decide once that holds for all hosts."""
    actions: tuple[Action, ...] = ()
    if failure is None and state.phase in {PREPARING, RUNNING}:
        failure = Failure(host.name, "the ranks were stopped", LOST)
    if failure is not None:
        state, actions = _failed(state, host.launcher, failure, at)
        if host.launcher in state.reports:
            # The last report is more precise than the first.
            report = state.reports[host.launcher]._replace(failure=failure)
            state = state._replace(reports={**state.reports, host.launcher: report})
    if state.phase != STOPPING:
        return state, actions
    state = with_host(state, host._replace(is_stopped=True))
    state, more = _arbitrate(state, at)
    return state, (*actions, *more)


def _arbitrate(state: State, at: float) -> Step:
    """Decide who failed first, and whether there is another attempt."""
    placed = [host for host in state.hosts.values() if host.has_place]
    if state.phase != STOPPING or not all(host.is_stopped for host in placed):
        return state, ()
    first = min(state.reports.values(), key=lambda report_: (report_.failure.is_victim, report_.at))
    failure, config = first.failure, state.config
    counts = not failure.is_departure
    is_final, given_up = decide(
        failure.no_retry, state.restarts, config.max_restarts, is_departure=not counts
    )
    verdict = Verdict(state.generation, first.launcher, failure, is_final, given_up)
    if is_final:
        return _end(state, verdict, at)
    culprit = state.hosts.get(first.launcher)
    if counts and culprit is not None:
        state = with_host(state, culprit._replace(failure_count=culprit.failure_count + 1))
    sentence = to_placed(state, verdict)
    cleared = {
        launcher: host._replace(
            is_joined=host.is_joined and not host.has_place,
            has_place=False,
            is_ready=False,
            is_done=False,
            is_stopped=False,
        )
        for launcher, host in state.hosts.items()
    }
    timeout_s = config.rdzv_timeout_s
    return state._replace(
        phase=FORMING,
        generation=state.generation + 1,
        restarts=state.restarts + counts,
        hosts=cleared,
        roster=None,
        placed=(),
        reports={},
        stop=None,
        verdict=verdict,
        deadline=max(at, state.not_before) + timeout_s,
        timeout_s=timeout_s,
        is_short=False,
        wake_at=min(state.wake_at, max(at, state.not_before)),
        refused=(),
    ), (sentence,)


# Leaving --------------------------------------------------------------------------------------


def _broken(state: State, connection: int, at: float) -> Step:
    """Note that a connection is gone; its launcher may reconnect."""
    launcher = state.connections.get(connection)
    if launcher is None:
        return state, ()
    state = without_connection(state, connection)
    host = state.hosts.get(launcher)
    if host is not None and host.connection == connection:
        state = with_host(state, host._replace(connection=None, broken_at=at))
    return state, ()


def _left(state: State, host: Host, failure: Failure | None, at: float) -> Step:
    """Handle a launcher that leaves at the end, or because it was asked to stop."""
    state = without_host(state, host)
    closing = () if host.connection is None else (Close(host.connection),)
    if state.phase == ENDED:
        return state, closing
    # A launcher that was cut off ends by itself; that need not end the others.
    is_departure = state.config.may_change
    failure = failure or Failure(host.name, "fleetrun has ended", LOST, is_departure=is_departure)
    if state.phase == FORMING:
        # A launcher without a place is not missed.
        is_spare = state.generation > 0 and host.since < 0
        may_go = state.config.may_change and (failure.is_departure or is_spare)
        if may_go and not host.is_local:
            state, actions = _form(state, at)
            return state, (*closing, *actions)
        ended = Verdict(state.generation, host.launcher, failure, is_final=True)
        state, actions = _end(state, ended, at)
        state = state._replace(heard_end=state.heard_end | {host.launcher})
    elif host.has_place:
        state, first = _failed(state, host.launcher, failure, at)
        state, more = _arbitrate(state, at)
        actions = (*first, *more)
    else:
        actions = ()
    return state, (*closing, *actions)


def _look(state: State, at: float) -> Step:
    """Find lost hosts, and handle deadlines that have passed."""
    config = state.config
    asleep = at - state.looked_at - 2 * config.look_s
    if asleep > config.heartbeat_timeout_s / 2:
        # This process itself was stopped: give living hosts time for a heartbeat.
        hosts = {
            name: host._replace(heard_at=host.heard_at + asleep, broken_at=host.broken_at and at)
            for name, host in state.hosts.items()
        }
        state = state._replace(hosts=hosts)
    due = at + config.look_s
    if state.phase in {FORMING, PREPARING} and at < state.deadline:
        due = min(due, state.deadline)
    state = state._replace(looked_at=at, wake_at=due)
    actions: list[Action] = []
    for host in list(state.hosts.values()):
        if _is_lost(config, host, at) and host.launcher in state.hosts:
            state, more = _lost(state, host, at)
            actions += more
    if state.phase == FORMING:
        state, more = _form(state, at)
        actions += more
    if state.phase in {FORMING, PREPARING}:
        state, more = _wait(state, at)
        actions += more
    if state.phase == RUNNING and config.is_elastic:
        state, more = _grow(state, at)
        actions += more
    return state, tuple(actions)


def _grow(state: State, at: float) -> Step:
    """Start again with the hosts that stand by, once no other has come for a while."""
    placed = [state.hosts[launcher] for launcher in state.placed if launcher in state.hosts]
    known = state.left_out.union(state.placed)
    new = [host for host in state.here if host.launcher not in known]
    is_full = len(placed) >= state.config.most
    # A generation that is partly done is not begun again.
    if is_full or not new or any(host.is_done for host in placed):
        return state, ()
    if at < max(host.joined_at for host in new) + state.config.elastic_timeout_s:
        return state, ()
    names = rank_assignment.listed([host.name for host in new])
    failure = Failure(names, "fleetrun was started", LOST, is_departure=True)
    return _failed(state, "", failure, at)


def _is_lost(config: RendezvousConfig, host: Host, at: float) -> bool:
    if host.is_local:
        return False
    if at - host.heard_at >= config.heartbeat_timeout_s - config.look_s:
        return True
    is_broken = host.broken_at is not None and not host.is_redialing
    return is_broken and at - (host.broken_at or 0.0) >= config.rejoin_s


def _lost(state: State, host: Host, at: float) -> Step:
    """Go on without HOST, or end."""
    config = state.config
    had_place = host.has_place or host.order >= 0
    state = without_host(state, host)
    closing: tuple[Action, ...] = () if host.connection is None else (Close(host.connection),)
    if state.phase == ENDED or not had_place:
        return state, closing
    failure_counts = {**state.failure_counts, _where(host): host.failure_count + 1}
    state = state._replace(failure_counts=failure_counts, lost={**state.lost, host.launcher: host})
    # A launcher whose connection broke ended at that moment. Silence says nothing about the ranks:
    # what others report before a host counts as lost happened first.
    since = at if host.broken_at is None or host.is_redialing else host.broken_at
    silence = f"the launcher has been silent for {at - host.heard_at:.0f} s"
    how = "fleetrun was lost" if host.broken_at is not None else silence
    failure = Failure(host.name, how, LOST, is_departure=config.may_change)
    if state.phase == FORMING:
        if failure.is_departure:
            # The remaining hosts may be too few now.
            deadline = max(state.deadline, state.not_before + state.timeout_s)
            return state._replace(deadline=deadline, is_short=False), closing
        ended = Verdict(state.generation, host.launcher, failure, is_final=True)
        state, actions = _end(state, ended, at)
        return state, (*closing, *actions)
    state, first = _failed(state, host.launcher, failure, since)
    state, more = _arbitrate(state, at)
    return state, (*closing, *first, *more)


def _killed(state: State, event: Received) -> Step:
    """Handle the report of the guard that its launcher was killed."""
    message, at = event.message, event.at
    assert isinstance(message, LauncherKilled)
    host = state.hosts.get(message.launcher) or state.lost.get(message.launcher)
    if host is None or host.is_local:
        return state, (Close(event.connection),)
    host = host._replace(
        has_no_ranks=not message.has_ranks,
        broken_at=at if host.broken_at is None else host.broken_at,
        is_redialing=False,
    )
    if message.launcher not in state.lost:
        return _lost(state, host, at)
    # Nobody needs to wait for the end of its ranks any more.
    state = state._replace(lost={**state.lost, message.launcher: host})
    return _form(state, at)


def _wait(state: State, at: float) -> Step:
    """Report which hosts are missing, or end the job when the timeout has passed."""
    awaited, is_late = _missing(state), state.phase == PREPARING
    verb = "took too long" if is_late else "did not come"
    if at >= state.deadline:
        what = f"{awaited} {verb} within {state.timeout_s:g} s"
        return _rendezvous_failed(state, "; ".join((what, *state.remarks)), at)
    missing = _awaited(state, state.remarks, at)
    # Until when is news, too: hosts print how long they still wait.
    news = "\n".join((awaited, *state.remarks, f"{at + missing.left_s:.0f}"))
    if news == state.told or at < state.told_at + _REMARK_S:
        return state, ()
    state = state._replace(told=news, told_at=at)
    return state, (to_hosts(state.hosts.values(), missing),)


def _rendezvous_failed(state: State, what: str, at: float) -> Step:
    failure = Failure("", what, RendezvousError.exit_code)
    return _end(state, Verdict(state.generation, "", failure, is_final=True), at)


def _end(state: State, verdict: Verdict, at: float) -> Step:
    """End the job, and send the verdict to all hosts."""
    connected = (host.launcher for host in state.hosts.values() if host.connection is not None)
    state = state._replace(
        phase=ENDED,
        verdict=verdict,
        heard_end=state.heard_end.union(connected),
        wake_at=at + state.config.look_s,
    )
    return state, (to_hosts(state.hosts.values(), verdict),)
