"""The coordinator decides for all hosts: `step(state, event) -> (state, actions)`, pure.

    FORMING    hosts ask for places; a roster is sent when the right ones are there
    PREPARING  each host of the roster plans its part; all start when all are ready
    RUNNING    until all are done, one has failed or is lost, or a host waits for a place
    STOPPING   until no rank runs anywhere; then all hear the verdict
    ENDED      the final verdict is known; who comes late hears it, too, but not the next job

A verdict that is not final leads from STOPPING to FORMING of the next generation. An event only
changes what is known; `_advance` then draws the conclusions, whatever the event was.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple, TypeAlias

from fleetrun.run.events import Failure
from fleetrun.run.policy import POLITE, decide
from fleetrun.rundir.variables import TOKEN
from fleetrun.session import messages, rank_assignment
from fleetrun.session.messages import DONE, LOST, READY, STOPPED, UNMET, RendezvousConfig, Verdict
from fleetrun.session.rank_assignment import Host

FORMING, PREPARING, RUNNING = "forming", "preparing", "running"
STOPPING, ENDED = "stopping", "ended"
# How many remarks are kept; the exit codes of hosts that were asked to end.
_REMARKS, _ASKED = 16, frozenset(128 + signum for signum in POLITE)


class Heard(NamedTuple):
    """A message over LINK from ADDRESS; IS_LOCAL: from the coordinator's own launcher.

    The coordinator can promise PROMISE_S seconds, for which nobody replaces it.
    """

    link: int
    message: messages.FromMember
    at: float
    address: str
    is_local: bool = False
    promise_s: float = inf


class Broken(NamedTuple):
    """The connection LINK has ended."""

    link: int
    at: float


class Tick(NamedTuple):
    """Time has passed, in which this launcher stood still for STOOD_S seconds."""

    at: float
    stood_s: float = 0.0


class Send(NamedTuple):
    """Send a message over some links, or hang up on them after what was sent (None)."""

    links: tuple[int, ...]
    message: messages.FromCoordinator | None


Event: TypeAlias = Heard | Broken | Tick


class Blame(NamedTuple):
    """Something went wrong in this generation on the host WHERE; None: it is no host's fault."""

    where: tuple[str, str] | None
    failure: Failure
    # The coordinator has only lost the host, and the host may know better.
    is_loss: bool = False


class State(NamedTuple):
    """What the coordinator knows."""

    config: RendezvousConfig
    # The name of the session, once it has begun, and until then the one that it would get.
    session: str
    # When it began to form a generation.
    since: float = 0.0
    # Whether only launchers of the job can call, by its token or from its hosts.
    knows_callers: bool = True
    # The hosts in the order of their ranks, if they are listed.
    names: tuple[str, ...] = ()
    phase: str = FORMING
    has_begun: bool = False
    # How many hosts of a lost coordinator's session may still come to this one, which follows it.
    expected: int = 0
    generation: int = 0
    # The least number of the next one, as hosts may have started generations without us.
    next_generation: int = 0
    restarts: int = 0
    # By the numbers of their links.
    hosts: Mapping[int, Host] = {}
    # No generation begins earlier: until then, ranks of a lost host may run.
    not_before: float = 0.0
    # By launcher, the first one first.
    blames: Mapping[str, Blame] = {}
    # How often the job has failed because of each host.
    counts: Mapping[tuple[str, str], int] = {}
    # Launchers that have heard the final verdict.
    heard_end: frozenset[str] = frozenset()
    verdict: Verdict | None = None
    remarks: tuple[str, ...] = ()
    # What hosts that wait were told last.
    news: messages.Missing | None = None
    actions: tuple[Send, ...] = ()

    @property
    def placed(self) -> dict[int, Host]:
        """The hosts of this generation that are still here."""
        return {link: host for link, host in self.hosts.items() if host.place is not None}

    @property
    def joined(self) -> dict[int, Host]:
        """The hosts that ask for a place."""
        return {link: host for link, host in self.hosts.items() if host.is_joined}

    @property
    def local(self) -> Host | None:
        """The coordinator's own host, once it has joined."""
        return next((host for host in self.hosts.values() if host.is_local), None)

    def send(self, message: messages.FromCoordinator | None, *links: int) -> State:
        """Send MESSAGE over LINKS, or hang up (None)."""
        return self._replace(actions=(*self.actions, Send(links, message))) if links else self

    def with_host(self, link: int, host: Host) -> State:
        """Add or replace the host at LINK."""
        return self._replace(hosts={**self.hosts, link: host})

    def without_host(self, link: int) -> State:
        """Forget the host at LINK."""
        hosts = {other: host for other, host in self.hosts.items() if other != link}
        return self._replace(hosts=hosts)

    def blame(self, host: Host | None, failure: Failure, *, is_loss: bool = False) -> State:
        """Take note of FAILURE; what a host says itself replaces what was known of it."""
        launcher, where = (host.launcher, host.where) if host else ("", None)
        return self._replace(blames={**self.blames, launcher: Blame(where, failure, is_loss)})

    def remark(self, text: str) -> State:
        """Keep TEXT for the users of all hosts; a flood displaces only itself."""
        return self._replace(remarks=tuple(dict.fromkeys((*self.remarks, text)))[:_REMARKS])


def step(state: State, event: Event) -> tuple[State, tuple[Send, ...]]:
    """Return the state after EVENT, and the actions to perform."""
    match event:
        case Heard(message=messages.Join() as join) if not _is_of_next_job(state, join):
            state = _join(state, event, join)
        case Heard() if event.link in state.hosts:
            state = _hear(state, event)
        case Heard():
            state = state.send(None, event.link)
        case Broken(link=link):
            state = _lose(state, link, "fleetrun was lost")
        case Tick():
            state = _look(state, event)
    state = _advance(state, event.at)
    return state._replace(actions=()), state.actions


# Who may take part ------------------------------------------------------------------------------


def _is_of_next_job(state: State, join: messages.Join) -> bool:
    # It calls again, and finds the coordinator of that when this one has gone.
    is_known = join.last is not None or join.request.launcher in state.heard_end
    return state.phase == ENDED and state.has_begun and not is_known


def _join(state: State, event: Heard, join: messages.Join) -> State:
    """Let a launcher in, or refuse it."""
    link, host = event.link, Host(join.request, event.address, event.is_local, event.at, event.at)
    if join.last is not None:
        state = _resume(state, join.last)
    if link not in state.hosts and (why := _refusal(state, host, join)):
        return _refuse(state, link, host, why)
    if state.verdict is not None:
        heard_end = state.heard_end | {host.launcher}
        return state.with_host(link, host)._replace(heard_end=heard_end).send(state.verdict, link)
    known, failure = state.hosts.get(link), join.failure
    if failure is None and known is None and (why := _misfit(state, host)):
        failure = Failure(host.name, why, UNMET)
    if failure is not None:
        state = state.without_host(link)
        if state.phase != FORMING or (state.config.may_change and not host.is_local):
            return _refuse(state, link, host, failure.what)
        return _end(state.with_host(link, host), host.launcher, failure)
    if known is not None:
        host = known._replace(request=join.request, is_joined=True, heard_at=event.at)
        return _acknowledge(state.with_host(link, host), event, 0)
    for other_link, other in state.hosts.items():
        if other.launcher == host.launcher:
            # It calls again before anything runs.
            state = state.without_host(other_link).send(None, other_link)
    state = state.with_host(link, host)
    return _acknowledge(state.send(_news(state), link), event, 0)


def _resume(state: State, last: messages.LastRun) -> State:
    """Continue the session of a coordinator that was lost, unless another one has begun."""
    if state.config.has_store and state.phase == FORMING and not state.has_begun:
        state = state._replace(session=last.session, has_begun=True, expected=last.hosts - 1)
    if last.session != state.session:
        return state
    # Not all of them know of all that has happened.
    generation = max(state.next_generation, last.generation + 1)
    return state._replace(next_generation=generation, restarts=max(state.restarts, last.restarts))


def _refusal(state: State, host: Host, join: messages.Join) -> str:
    """Return why a launcher cannot take part, whatever it brings; empty if it can."""
    config, last = state.config, join.last
    if last is not None and last.session != state.session:
        return "it belongs to another job of this name, whose coordinator was lost"
    if state.has_begun and not (state.knows_callers or last is not None or host.is_local):
        return f"the job has begun, and without {TOKEN} no other host can join it"
    if state.phase == ENDED:
        return ""
    others = [other for other in state.hosts.values() if other.launcher != host.launcher]
    can_wait = config.may_change and len(others) == len(state.hosts)
    is_full = len(others) >= config.most + config.spares and not host.is_local
    if is_full or (state.phase != FORMING and not can_wait):
        return "all hosts of the job are there"
    return ""


def _misfit(state: State, host: Host) -> str:
    """Return why HOST does not fit to the others, and differs where all must agree, if it does."""
    rank, local = host.request.rank, state.local
    for other in state.hosts.values():
        if rank is not None and other.request.rank == rank and other.launcher != host.launcher:
            return f"{other.name}, pid {other.request.pid}, has rank {rank}, too"
        hostname, address = other.request.hostname, other.entry.host
        is_elsewhere = hostname != host.request.hostname and host.request.host != ""
        if is_elsewhere and address == host.entry.host:
            return f"{hostname} has the address {address}, too: give each host its own --host"
    return "" if local is None else rank_assignment.difference(local, host)


def _refuse(state: State, link: int, host: Host, why: str) -> State:
    """Let the job do without HOST, and tell all why."""
    state = state.remark(f"{host.name} cannot take part: {why}")
    failure = Failure("", f"the coordinator refused this host: {why}", UNMET)
    verdict = Verdict(state.generation, "", failure, is_final=True)
    return state.send(verdict, link).send(None, link)


# What happens to hosts --------------------------------------------------------------------------


def _acknowledge(state: State, event: Heard, number: int) -> State:
    """Answer the heartbeat NUMBER: ranks may run for a while from when it was sent."""
    left_s = max(0.0, min(state.config.heartbeat_timeout_s, event.promise_s))
    return state.send(messages.Acknowledged(number, left_s), event.link)


def _hear(state: State, event: Heard) -> State:
    link, at = event.link, event.at
    host = state.hosts[link]._replace(heard_at=at)
    state = state.with_host(link, host)
    match event.message:
        case messages.Heartbeat(number=number):
            return _acknowledge(state, event, number)
        case messages.Leave(failure=left) as leave:
            # A job that has begun needs nobody who has never had a place.
            is_needed = state.phase == FORMING and (not state.has_begun or host.order >= 0)
            if left and not left.is_departure and is_needed:
                return _end(state, host.launcher, left)
            return _lose(state, link, "fleetrun has ended", leave).send(None, link)
        case messages.Report() as report if report.generation == state.generation:
            return state if host.place is None else _note(state, link, host, report)
        case _:
            return state


def _note(state: State, link: int, host: Host, report: messages.Report) -> State:
    """Take note of what a host of this generation reports."""
    stage, failure = report.stage, report.failure
    if stage == STOPPED and failure is None and state.phase in {PREPARING, RUNNING}:
        failure = Failure(host.name, "the ranks were stopped", LOST)
    # Each is taken only in its time.
    is_due = {READY: not host.stage, DONE: state.phase == RUNNING, STOPPED: True}
    if is_due.get(stage, False):
        state = state.with_host(link, host._replace(stage=stage))
    return state if failure is None else state.blame(host, failure)


def _lose(state: State, link: int, what: str, leave: messages.Leave | None = None) -> State:
    """Forget a host; without its LEAVE, its ranks may run until it must have killed them."""
    if (host := state.hosts.get(link)) is None:
        return state
    state = state.without_host(link)
    if host.place is None or host.stage == STOPPED or state.phase in {FORMING, ENDED}:
        return state
    if leave is None:
        fenced_at = host.heard_at + state.config.heartbeat_timeout_s
        state = state._replace(not_before=max(state.not_before, fenced_at))
    if host.launcher in state.blames:
        # What had failed there before is not forgotten.
        return state
    if leave is not None and leave.failure is not None:
        return state.blame(host, leave.failure)
    lost = Failure(host.name, what, LOST, is_departure=state.config.may_change)
    return state.blame(host, lost, is_loss=True)


def _look(state: State, tick: Tick) -> State:
    """Give up hosts that are silent for too long, and tell the others who is missing."""
    config, local, at = state.config, state.local, tick.at
    silences_s = [at - host.heard_at for host in state.placed.values()]
    has_cut_off = any(time_s >= config.fence_s > time_s - tick.stood_s for time_s in silences_s)
    if has_cut_off and state.phase not in {FORMING, ENDED} and local is not None:
        # It stood still until a host was cut off, which is not to blame.
        what = f"fleetrun was stopped or without a processor for {tick.stood_s:.0f} s"
        state = state.blame(None, Failure(local.name, what, LOST, is_departure=config.may_change))
    for link, host in state.hosts.items():
        # Nothing runs while it forms a generation, so who was not heard meanwhile may go on.
        silence_s = at - host.heard_at - (tick.stood_s if state.phase == FORMING else 0.0)
        if silence_s > config.heartbeat_timeout_s:
            what = f"the launcher has been silent for {silence_s:.0f} s"
            state = _lose(state, link, what).send(None, link)
    if state.phase == FORMING and (news := _news(state)) != state.news:
        state = state.send(news, *state.joined)._replace(news=news)
    return state


# What follows -----------------------------------------------------------------------------------


def _advance(state: State, at: float) -> State:  # noqa: PLR0911 - one for each case
    """Draw the conclusions from what is known."""
    placed = state.placed
    stages = {host.stage for host in placed.values()}
    match state.phase:
        case "forming":
            return _form(state, at)
        case "preparing" | "running" if state.blames:
            first = next(iter(state.blames.values()))
            state = state.send(messages.Stop(state.generation, first.failure), *placed)
            return _advance(state._replace(phase=STOPPING), at)
        case "preparing" if stages == {READY}:
            state = state.send(messages.Start(state.generation), *placed)
            return state._replace(phase=RUNNING)
        case "running" if stages == {DONE}:
            return _end(state, "", None)
        case "running" if DONE not in stages and (new := _newcomers(state, at)):
            where, what = rank_assignment.listed(new), "fleetrun was started"
            failure = Failure(where, what, LOST, is_departure=True)
            return _advance(state.blame(None, failure), at)
        case "stopping" if stages <= {STOPPED}:
            return _conclude(state, at)
        case _:
            return state


def _news(state: State) -> messages.Missing:
    """Return what hosts are told while they wait."""
    config = state.config
    if state.phase == FORMING:
        who = rank_assignment.missing(config, list(state.joined.values()), state.names)
        return messages.Missing(who, config, state.remarks)
    running = rank_assignment.listed([host.name for host in state.placed.values()])
    who = f"a place in the job, which runs on {running}" if running else "a place in the job"
    return messages.Missing(who, config, state.remarks, stands_by=True)


def _form(state: State, at: float) -> State:
    """Send the roster as soon as the right hosts are there, or give up."""
    config, joined = state.config, state.joined
    dismissed = rank_assignment.dismissed(joined, state.counts, config.most)
    newest = max((host.joined_at for host in joined.values()), default=state.since)
    has_waited = state.has_begun or (config.may_change and at >= newest + config.elastic_timeout_s)
    are_back = len(joined) == len(state.hosts) and at >= state.not_before
    # They find the coordinator that follows theirs within the heartbeat timeout.
    is_late = at >= state.since + config.heartbeat_timeout_s
    are_enough = len(joined) - len(dismissed) >= (config.least if has_waited else config.most)
    if are_back and are_enough and (is_late or len(joined) >= state.expected):
        return _send_roster(state, dismissed)
    is_short = state.has_begun and not state.expected and config.may_change and are_back
    limit_s = config.elastic_timeout_s if is_short else config.rdzv_timeout_s
    if at < max(state.since, state.not_before, newest if state.has_begun else 0.0) + limit_s:
        return state
    what = f"{_news(state).who} did not come within {limit_s:g} s: run the same command there, or "
    what += "`fleetrun doctor` with its options on all hosts, which names what is in the way"
    return _end(state, "", Failure("", "; ".join((what, *state.remarks)), UNMET))


def _send_roster(state: State, dismissed: list[int]) -> State:
    """Give the hosts their places that ask for one, except those that are DISMISSED."""
    for link in dismissed:
        host = state.hosts[link]
        why = f"the job has failed {state.counts[host.where]} times because of it"
        state = state.remark(f"{host.name} stays out: {why}")
    fit = {link: host for link, host in state.joined.items() if link not in dismissed}
    links = rank_assignment.assigned(fit, state.config.most)
    for place, link in enumerate(links):
        host = fit[link]._replace(place=place, order=place, is_joined=False, stage="")
        state = state.with_host(link, host)
    state = state._replace(
        phase=PREPARING,
        has_begun=True,
        expected=0,
        generation=state.next_generation,
        news=None,
    )
    entries = tuple(state.hosts[link].entry for link in links)
    roster = messages.RosterMessage(
        state.generation, state.restarts, entries, state.config, state.remarks, state.session
    )
    standing = [link for link, host in state.hosts.items() if host.place is None]
    return state.send(roster, *links).send(_news(state), *standing)


def _newcomers(state: State, at: float) -> list[str]:
    """Return the names of hosts with which all should start again."""
    config = state.config
    if config.least == config.most or len(state.placed) >= config.most:
        return []
    is_failing = rank_assignment.is_failing
    new = [host for host in state.joined.values() if not is_failing(host, state.counts)]
    newest = max((host.joined_at for host in new), default=inf)
    return [host.name for host in new] if at >= newest + config.elastic_timeout_s else []


def _conclude(state: State, at: float) -> State:
    """Tell all the verdict: the first failure that no other one has caused."""
    launcher, blame = min(
        state.blames.items(), key=lambda item: (item[1].failure.is_victim, item[1].is_loss)
    )
    failure, most = blame.failure, state.config.max_restarts
    decision = decide(failure.no_retry, state.restarts, most, is_departure=failure.is_departure)
    if decision.is_final:
        return _end(state, launcher, failure, decision.given_up)
    counts = dict(state.counts)
    if blame.where is not None and failure.exit_code not in _ASKED:
        counts[blame.where] = counts.get(blame.where, 0) + 1
    verdict = Verdict(state.generation, launcher, failure, is_final=False)
    state = state.send(verdict, *state.placed)._replace(
        phase=FORMING,
        since=at,
        hosts={link: host._replace(place=None, stage="") for link, host in state.hosts.items()},
        next_generation=max(state.generation + 1, state.next_generation),
        restarts=state.restarts + (not failure.is_departure),
        counts=counts,
        blames={},
    )
    return _form(state, at)


def _end(state: State, launcher: str, failure: Failure | None, given_up: str = "") -> State:
    """End the job on all hosts."""
    verdict = Verdict(state.generation, launcher, failure, is_final=True, given_up=given_up)
    heard_end = frozenset(host.launcher for host in state.hosts.values())
    state = state._replace(phase=ENDED, verdict=verdict, heard_end=heard_end)
    return state.send(verdict, *state.hosts)
