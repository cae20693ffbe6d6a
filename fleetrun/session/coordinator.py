"""The coordinator decides for all hosts: `step(state, event) -> (state, actions)`, pure.

    FORMING    hosts ask for places; a roster is sent when the right ones are there
    PREPARING  each host of the roster plans its part; all start when all are ready
    RUNNING    until all are done, one has failed or is lost, or a host waits for a place
    STOPPING   until no rank runs anywhere; then all hear the verdict
    ENDED      the final verdict is known; who comes late hears it, too

A verdict that is not final leads from STOPPING to FORMING of the next generation. An event only
changes what is known; `_advance` then draws the conclusions, whatever the event was.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple, TypeAlias

from fleetrun.errors import RendezvousError
from fleetrun.run.events import Failure
from fleetrun.run.policy import decide
from fleetrun.rundir.variables import TOKEN
from fleetrun.session import messages, rank_assignment
from fleetrun.session.config import PREPARE_S, RendezvousConfig
from fleetrun.session.messages import DONE, LOST, READY, STOPPED, Missing, RosterMessage, Verdict
from fleetrun.session.rank_assignment import Host

FORMING, PREPARING, RUNNING, STOPPING, ENDED = (
    "forming",
    "preparing",
    "running",
    "stopping",
    "ended",
)
# How many remarks are kept, and how long a process that SIGKILL does not end at once may take.
_REMARKS, _STUCK_S = 16, 30.0
_FULL = "all hosts of the job are there"


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
    """Something went wrong in this generation, by LAUNCHER."""

    launcher: str
    where: tuple[str, str]
    failure: Failure
    # The coordinator has only lost the host, and the host may know better.
    is_loss: bool = False


class State(NamedTuple):
    """What the coordinator knows."""

    config: RendezvousConfig
    # The name of the session, once it has begun, and until then the one that it would get.
    session: str
    # When this phase began.
    since: float = 0.0
    # Whether only launchers of the job can call, by its token or from its hosts.
    knows_callers: bool = True
    # The hosts in the order of their ranks, if they are listed.
    names: tuple[str, ...] = ()
    phase: str = FORMING
    has_begun: bool = False
    # Whether it continues the session of a coordinator that was lost, whose other hosts may come.
    is_adopted: bool = False
    expected: int = 0
    generation: int = 0
    restarts: int = 0
    # By the numbers of their links.
    hosts: Mapping[int, Host] = {}
    # No generation begins earlier: until then, ranks of a lost host may run.
    not_before: float = 0.0
    # The least number of the next generation, as hosts have started earlier ones without us.
    next_generation: int = 0
    # Whether ranks of this generation may run.
    has_started: bool = False
    blames: tuple[Blame, ...] = ()
    # How often the job has failed because of each host.
    counts: Mapping[tuple[str, str], int] = {}
    # Launchers that stay out of this generation, and those that have heard the final verdict.
    left_out: frozenset[str] = frozenset()
    heard_end: frozenset[str] = frozenset()
    verdict: Verdict | None = None
    remarks: tuple[str, ...] = ()
    # What hosts that wait were told last.
    told: str = ""
    actions: tuple[Send, ...] = ()

    @property
    def placed(self) -> dict[int, Host]:
        """The hosts of this generation that are still here."""
        return {link: host for link, host in self.hosts.items() if host.place is not None}

    @property
    def local(self) -> Host | None:
        """The coordinator's own host, once it has joined."""
        return next((host for host in self.hosts.values() if host.is_local), None)

    def send(self, message: messages.FromCoordinator | None, *links: int) -> State:
        """Send MESSAGE over LINKS."""
        return self._replace(actions=(*self.actions, Send(links, message))) if links else self

    def hang_up(self, link: int) -> State:
        """End the connection LINK."""
        return self.send(None, link)

    def with_host(self, link: int, host: Host) -> State:
        """Add or replace the host at LINK."""
        return self._replace(hosts={**self.hosts, link: host})

    def without_host(self, link: int) -> State:
        """Forget the host at LINK."""
        hosts = {other: host for other, host in self.hosts.items() if other != link}
        return self._replace(hosts=hosts)

    def enter(self, phase: str, at: float) -> State:
        """Begin a phase."""
        return self._replace(phase=phase, since=at, told="")

    def remark(self, *texts: str) -> State:
        """Keep TEXTS for the users of all hosts; a flood displaces only itself."""
        new = tuple(text for text in dict.fromkeys(texts) if text not in self.remarks)
        return self._replace(remarks=(*self.remarks, *new)[:_REMARKS], told="") if new else self


def step(state: State, event: Event) -> tuple[State, tuple[Send, ...]]:
    """Return the state after EVENT, and the actions to perform."""
    match event:
        case Heard(message=messages.Join() as join):
            state = _join(state, event, join)
        case Heard() if event.link in state.hosts:
            state = _hear(state, event)
        case Heard():
            state = state.hang_up(event.link)
        case Broken(link=link):
            state = _lose(state, link, "fleetrun was lost")
        case Tick(at=at, stood_s=stood_s):
            state = _tell(_look(_excuse(state, stood_s), at))
    state = _advance(state, event.at)
    return state._replace(actions=()), state.actions


# Who may take part ------------------------------------------------------------------------------


def _join(state: State, event: Heard, join: messages.Join) -> State:
    """Let a launcher in, or refuse it."""
    link, request, at = event.link, join.request, event.at
    if join.last is not None:
        state = _resume(state, join.last)
    why = _refusal(state, event, join)
    if why:
        state = state.remark(f"{request.named(event.address)} cannot take part: {why}")
        return state.send(messages.Refused(why), link).hang_up(link)
    host = Host(request, event.address, event.is_local, at, at)
    if state.phase == ENDED:
        verdict = state.verdict
        assert verdict is not None
        heard_end = state.heard_end | {join.request.launcher}
        return state.with_host(link, host)._replace(heard_end=heard_end).send(verdict, link)
    if join.failure is not None:
        return _fault(state, link, host, join.failure, at)
    for other_link, other in state.hosts.items():
        if other.launcher == join.request.launcher and other_link != link:
            # It calls again before anything runs.
            state = _lose(state, other_link, "fleetrun was lost").hang_up(other_link)
    known = state.hosts.get(link)
    if known is not None:
        known = known._replace(request=request, is_joined=True, heard_at=at)
        state = state.with_host(link, known)
    elif misfit := _misfit(state, host):
        failure = Failure("", misfit, RendezvousError.exit_code)
        return _fault(state.with_host(link, host), link, host, failure, at)
    else:
        state = state.with_host(link, host)
        state = state.send(_news(state, stands_by=state.phase != FORMING), link)
    return state.send(messages.Acknowledged(0, _promise(state, event)), link)


def _resume(state: State, last: messages.LastRun) -> State:
    """Continue the session of a coordinator that was lost, unless another one has begun."""
    config = state.config
    if last.session == state.session:
        later = max(state.next_generation, last.generation + 1)
        state = state._replace(next_generation=later)
        if state.phase == FORMING:
            state = state._replace(generation=max(state.generation, later))
    if not config.has_store or state.phase != FORMING or state.has_begun or state.is_adopted:
        return state
    return state._replace(
        session=last.session,
        is_adopted=True,
        expected=last.hosts - 1,
        generation=max(state.generation, last.generation + 1),
        restarts=max(state.restarts, last.restarts + (not config.may_change)),
    )


def _refusal(state: State, event: Heard, join: messages.Join) -> str:
    """Return why a launcher cannot take part, whatever it brings; empty if it can."""
    config = state.config
    if event.link in state.hosts:
        return ""
    is_former = join.last is not None and join.last.session == state.session
    if join.last is not None and not is_former:
        return "it belongs to another job of this name, whose coordinator was lost"
    is_known = state.knows_callers or is_former or event.is_local
    if state.has_begun and not is_known:
        return (
            f"the job has begun, and without {TOKEN} no other host can join it: set the same on "
            "every host"
        )
    if state.phase == ENDED:
        return ""
    others = [host for host in state.hosts.values() if host.launcher != join.request.launcher]
    is_new = len(others) == len(state.hosts)
    if state.phase != FORMING and not (is_new and config.may_change):
        return _FULL
    is_full = len(others) >= config.most + config.spares
    return _FULL if is_full and not event.is_local else ""


def _misfit(state: State, host: Host) -> str:
    """Return why HOST does not fit to the others, and differs where all must agree, if it does."""
    rank, most = host.request.rank, state.config.most
    if rank is not None and rank >= most:
        what = f"its rank is {rank}, and the job has {most} hosts, 0 to {most - 1}"
        return f"{host.name} cannot take part: {what}"
    for other in state.hosts.values():
        if rank is not None and other.request.rank == rank and other.launcher != host.launcher:
            pair = (f"{launcher.name}, pid {launcher.request.pid}" for launcher in (other, host))
            return f"two launchers have rank {rank}: {', and '.join(pair)}"
    local = state.local
    if local is None:
        return ""
    ours, theirs = local.request, host.request
    what = "; ".join(rank_assignment.differences(ours.settings, theirs.settings, ours.hostname))
    return f"{host.name} cannot take part: {what}" if what else ""


def _fault(state: State, link: int, host: Host, failure: Failure, at: float) -> State:
    """End the job because of a host that cannot take part, unless it can do without it."""
    state = state.without_host(link)
    if state.phase != FORMING or (state.config.may_change and not host.is_local):
        what = failure.what
        state = state.remark(what if host.name in what else f"{host.name} cannot take part: {what}")
        return state.send(messages.Refused(failure.what), link).hang_up(link)
    return _end(state.with_host(link, host), host.launcher, failure, at)


# What happens to hosts --------------------------------------------------------------------------


def _promise(state: State, event: Heard) -> float:
    """Return how long ranks may run from when the message of EVENT was sent."""
    return max(0.0, min(state.config.heartbeat_timeout_s, event.promise_s))


def _hear(state: State, event: Heard) -> State:
    link, at = event.link, event.at
    host = state.hosts[link]._replace(heard_at=at)
    state = state.with_host(link, host)
    match event.message:
        case messages.Heartbeat(number=number):
            return state.send(messages.Acknowledged(number, _promise(state, event)), link)
        case messages.Leave(failure=left):
            if left is not None and not left.is_departure and state.phase == FORMING:
                return _end(state, host.launcher, left, at)
            return _lose(state, link, "fleetrun has ended", left, is_clean=True).hang_up(link)
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
    return state if failure is None else _blame(state, host, failure)


def _blame(state: State, host: Host, failure: Failure, *, is_loss: bool = False) -> State:
    """Take note of FAILURE; what a host says itself completes what was known of it."""
    blame = Blame(host.launcher, host.where, failure, is_loss)
    known = [other.launcher for other in state.blames]
    if host.launcher not in known:
        return state._replace(blames=(*state.blames, blame))
    at = known.index(host.launcher)
    return state._replace(blames=(*state.blames[:at], blame, *state.blames[at + 1 :]))


def _lose(
    state: State, link: int, what: str, failure: Failure | None = None, *, is_clean: bool = False
) -> State:
    """Forget a host; unless the end IS_CLEAN, its ranks may run until it must have killed them."""
    host = state.hosts.get(link)
    if host is None:
        return state
    state = state.without_host(link)
    if host.place is None or host.stage == STOPPED or state.phase in {FORMING, ENDED}:
        return state
    if state.has_started and not is_clean:
        fenced_at = host.heard_at + state.config.heartbeat_timeout_s
        state = state._replace(not_before=max(state.not_before, fenced_at))
    if any(blame.launcher == host.launcher for blame in state.blames):
        # What had failed there before is not forgotten.
        return state
    lost = Failure(host.name, what, LOST, is_departure=state.config.may_change)
    return _blame(state, host, failure or lost, is_loss=failure is None)


def _excuse(state: State, stood_s: float) -> State:
    """Blame nobody else if this launcher stood still until the others were cut off."""
    config, local = state.config, state.local
    if stood_s < config.fence_s or state.phase in {FORMING, ENDED} or local is None:
        return state
    what = f"fleetrun was stopped or without a processor for {stood_s:.0f} s, and counts as lost"
    failure = Failure(local.name, what, LOST, is_departure=config.may_change)
    return state._replace(blames=(*state.blames, Blame("", ("", ""), failure)))


def _look(state: State, at: float) -> State:
    """Give up hosts that are silent for too long, or do not stop."""
    config = state.config
    stuck_s = config.grace_s + _STUCK_S + config.heartbeat_timeout_s
    for link, host in state.hosts.items():
        is_stopping = state.phase == STOPPING and host.place is not None and host.stage != STOPPED
        if is_stopping and at > state.since + stuck_s:
            state = _lose(state, link, f"its ranks did not end within {stuck_s:.0f} s")
        elif at > host.heard_at + config.heartbeat_timeout_s:
            silence_s = at - host.heard_at
            state = _lose(state, link, f"the launcher has been silent for {silence_s:.0f} s")
        else:
            continue
        state = state.hang_up(link)
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
            stop = messages.Stop(state.generation, state.blames[0].failure)
            return _advance(state.send(stop, *placed).enter(STOPPING, at), at)
        case "preparing" if stages == {READY}:
            state = state.send(messages.Start(state.generation), *placed)._replace(has_started=True)
            return state.enter(RUNNING, at)
        case "preparing" if at > state.since + PREPARE_S:
            late = next(host for host in placed.values() if host.stage != READY)
            what = f"it took longer than {PREPARE_S:.0f} s to get ready"
            return _advance(_blame(state, late, Failure(late.name, what, LOST)), at)
        case "running" if stages == {DONE}:
            return _end(state, "", None, at)
        case "running" if (blame := _growth(state, at)) is not None:
            return _advance(state._replace(blames=(blame,)), at)
        case "stopping" if stages <= {STOPPED}:
            return _conclude(state, at)
        case _:
            return state


def _wait(state: State) -> tuple[str, float, float]:
    """Return whom a coordinator that forms a generation waits for, until when, and how long."""
    config = state.config
    joined = [host for host in state.hosts.values() if host.is_joined]
    newest = max((host.joined_at for host in joined), default=state.since)
    is_waiting_for_more = state.has_begun and config.may_change and _are_back(state, newest)
    limit_s = config.elastic_timeout_s if is_waiting_for_more else config.rdzv_timeout_s
    began = max(state.since, state.not_before, newest if state.has_begun else 0.0)
    return rank_assignment.missing(config, joined, state.names), began + limit_s, limit_s


def _are_back(state: State, at: float) -> bool:
    """Whether all hosts ask for a place again, and no rank of a lost one can run AT a moment."""
    return all(host.is_joined for host in state.hosts.values()) and at >= state.not_before


def _news(state: State, *, stands_by: bool = False) -> Missing:
    """Return what hosts are told while they wait."""
    config = state.config
    if stands_by:
        running = [host.name for host in state.placed.values()]
        where = f", which runs on {rank_assignment.listed(running)}" if running else ""
        return Missing(f"a place in the job{where}", config, state.remarks, stands_by=True)
    return Missing(_wait(state)[0], config, state.remarks)


def _tell(state: State) -> State:
    """Tell the hosts that wait who is missing, if that has changed."""
    who = _wait(state)[0] if state.phase == FORMING else state.told
    if who == state.told:
        return state
    joined = [link for link, host in state.hosts.items() if host.is_joined]
    return state.send(_news(state), *joined)._replace(told=who)


def _form(state: State, at: float) -> State:
    """Send the roster as soon as the right hosts are there, or give up."""
    config = state.config
    joined = {link: host for link, host in state.hosts.items() if host.is_joined}
    hosts = list(joined.values())
    excluded = rank_assignment.left_out(hosts, state.counts, config.most)
    fit = {link: host for link, host in joined.items() if host.launcher not in excluded}
    newest = max((host.joined_at for host in hosts), default=state.since)
    has_waited = state.has_begun or (config.may_change and at >= newest + config.elastic_timeout_s)
    if state.is_adopted and config.may_change and not state.has_begun:
        # They find this coordinator within the heartbeat timeout of the lost one.
        is_late = at >= state.since + config.heartbeat_timeout_s
        has_waited = len(hosts) >= state.expected or is_late
    if _are_back(state, at) and len(fit) >= (config.least if has_waited else config.most):
        return _send_roster(state, fit, excluded, at)
    who, until, limit_s = _wait(state)
    if at >= until:
        what = f"{who} did not come within {limit_s:g} s"
        failure = Failure("", "; ".join((what, *state.remarks)), RendezvousError.exit_code)
        return _end(state, "", failure, at)
    return state


def _send_roster(
    state: State, fit: Mapping[int, Host], excluded: Mapping[str, str], at: float
) -> State:
    """Give the hosts that are FIT their places."""
    links = {host.launcher: link for link, host in fit.items()}
    before = 1 + max((host.order for host in fit.values()), default=-1)
    chosen = rank_assignment.assigned(list(fit.values()), state.config.most, before)
    hosts = dict(state.hosts)
    for place, host in enumerate(chosen):
        link = links[host.launcher]
        hosts[link] = hosts[link]._replace(place=place, order=place, is_joined=False, stage="")
    names = {host.launcher: host.name for host in hosts.values()}
    state = state.remark(*(f"{names[who]} stays out: {why}" for who, why in excluded.items()))
    state = state._replace(
        hosts=hosts,
        has_begun=True,
        blames=(),
        has_started=False,
        left_out=frozenset(excluded),
    )
    placed = sorted(state.placed, key=lambda link: hosts[link].order)
    entries = tuple(hosts[link].entry for link in placed)
    roster = RosterMessage(
        state.generation, state.restarts, entries, state.config, state.remarks, state.session
    )
    standing = [link for link, host in hosts.items() if host.place is None]
    state = state.send(roster, *placed)
    return state.send(_news(state, stands_by=True), *standing).enter(PREPARING, at)


def _growth(state: State, at: float) -> Blame | None:
    """Return why all should start again with more hosts, if they should."""
    config, placed = state.config, state.placed.values()
    is_partly_done = any(host.stage == DONE for host in placed)
    if not config.is_elastic or len(placed) >= config.most or is_partly_done:
        return None
    new = [
        host
        for host in state.hosts.values()
        if host.place is None and host.is_joined and host.launcher not in state.left_out
    ]
    if not new or at < max(host.joined_at for host in new) + config.elastic_timeout_s:
        return None
    names = rank_assignment.listed([host.name for host in new])
    failure = Failure(names, "fleetrun was started", LOST, is_departure=True)
    return Blame("", ("", ""), failure)


def _conclude(state: State, at: float) -> State:
    """Tell all the verdict: the first failure that no other one has caused."""
    blame = min(state.blames, key=lambda known: (known.failure.is_victim, known.is_loss))
    failure, placed = blame.failure, state.placed
    most = state.config.max_restarts
    decision = decide(failure.no_retry, state.restarts, most, is_departure=failure.is_departure)
    if decision.is_final:
        return _end(state, blame.launcher, failure, at, decision.given_up)
    counts = dict(state.counts)
    if blame.launcher:
        counts[blame.where] = counts.get(blame.where, 0) + 1
    verdict = Verdict(state.generation, blame.launcher, failure, is_final=False)
    hosts = {link: host._replace(place=None, stage="") for link, host in state.hosts.items()}
    state = state.send(verdict, *placed)._replace(
        hosts=hosts,
        generation=max(state.generation + 1, state.next_generation),
        restarts=state.restarts + (not failure.is_departure),
        counts=counts,
        blames=(),
        has_started=False,
        left_out=frozenset(),
    )
    return _form(state.enter(FORMING, at), at)


def _end(
    state: State, launcher: str, failure: Failure | None, at: float, given_up: str = ""
) -> State:
    """End the job on all hosts."""
    verdict = Verdict(state.generation, launcher, failure, is_final=True, given_up=given_up)
    hosts = state.hosts.values()
    state = state._replace(
        verdict=verdict,
        heard_end=frozenset(host.launcher for host in hosts),
    )
    return state.send(verdict, *state.hosts).enter(ENDED, at)
