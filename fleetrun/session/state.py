"""The coordinator's state, events and actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from fleetrun.run.events import Failure, TimerExpired
from fleetrun.rundir.hostsfile import HostEnd
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.messages import (
    LOST,
    Entry,
    FromCoordinator,
    FromMember,
    JoinRequest,
    RosterMessage,
    Stop,
    Verdict,
)
from fleetrun.session.rank_assignment import Host

if TYPE_CHECKING:
    from fleetrun.session.jobrecord import JobRecord, RosterEntry

FORMING, PREPARING, RUNNING, STOPPING, ENDED = (
    "forming",
    "preparing",
    "running",
    "stopping",
    "ended",
)

# How a host without a reported failure has ended.
SUCCEEDED, STOPPED, UNKNOWN = "its ranks succeeded", "its ranks were stopped", "its end is unknown"


class Received(NamedTuple):
    """A message from a connection; `address` is its other end, `own` is ours."""

    connection: int
    message: FromMember
    at: float
    address: str = ""
    own: str = ""
    # Whether it is from the coordinator's own launcher.
    is_local: bool = False


class Broken(NamedTuple):
    """A connection is lost."""

    connection: int
    at: float


class Send(NamedTuple):
    """Send a message over each of some connections."""

    connections: tuple[int, ...]
    message: FromCoordinator


class Close(NamedTuple):
    """Close a connection once everything is sent."""

    connection: int


Event: TypeAlias = Received | Broken | TimerExpired
Action: TypeAlias = Send | Close


class Report(NamedTuple):
    """A failure of this generation, and the time by which the first one is found."""

    at: float
    launcher: str
    failure: Failure


class Refusal(NamedTuple):
    """A refused caller: its address, and a remark for the job's hosts."""

    address: str
    line: str


class State(NamedTuple):
    """The state of the session."""

    config: RendezvousConfig
    wake_at: float
    # When the roster must be complete, and how long that is after its beginning.
    deadline: float
    timeout_s: float
    # Whether too few hosts are left, so that new ones are waited for.
    is_short: bool = False
    phase: str = FORMING
    # Identifies the job among others of its name.
    session: str = ""
    generation: int = 0
    restarts: int = 0
    # By their launchers, in the order in which they came.
    hosts: Mapping[str, Host] = {}
    connections: Mapping[int, str] = {}
    # The roster of this generation once it is formed, and its launchers.
    roster: RosterMessage | None = None
    placed: tuple[str, ...] = ()
    # Launchers that were left out of it, and how often hosts whose launchers are gone have failed
    # the job, by address and name.
    left_out: frozenset[str] = frozenset()
    failure_counts: Mapping[tuple[str, str], int] = {}
    # By launchers.
    reports: Mapping[str, Report] = {}
    stop: Stop | None = None
    # How the last generation ended.
    verdict: Verdict | None = None
    # Launchers that were told how the job ended.
    heard_end: frozenset[str] = frozenset()
    # Lost launchers. Their ranks must be dead by now, so they never rejoin a job that may have gone
    # on without them.
    lost: Mapping[str, Host] = {}
    # Whether callers prove a token; otherwise only listed hosts may join once the job has begun.
    has_token: bool = True
    refused: tuple[Refusal, ...] = ()
    # Our own address, as the others see it.
    own: str = ""
    looked_at: float = 0.0
    told_at: float = 0.0
    told: str = ""

    @property
    def not_before(self) -> float:
        """The earliest start of a generation, as a lost host may still be training."""
        unknown = (host.heard_at for host in self.lost.values() if not host.has_no_ranks)
        return max(unknown, default=float("-inf")) + self.config.quarantine_s

    @property
    def here(self) -> list[Host]:
        """The connected hosts that have joined the next generation."""
        return [h for h in self.hosts.values() if h.is_joined and h.connection is not None]

    @property
    def remarks(self) -> tuple[str, ...]:
        """The remarks for all hosts about refused ones."""
        return tuple(refusal.line for refusal in self.refused)

    @property
    def is_over(self) -> bool:
        """Whether there is nobody left to inform."""
        others = (host for host in self.hosts.values() if not host.is_local)
        return self.phase == ENDED and not any(True for _ in others)


Step: TypeAlias = tuple[State, tuple[Action, ...]]


def begin(
    config: RendezvousConfig, at: float, session: str = "", *, has_token: bool = True
) -> State:
    """Return the initial state of SESSION."""
    return State(
        config,
        at + min(config.look_s, config.rdzv_timeout_s),
        at + config.rdzv_timeout_s,
        config.rdzv_timeout_s,
        looked_at=at,
        told_at=at,
        session=session,
        has_token=has_token,
    )


def resume(
    at: float, record: JobRecord, launcher: str, lost_at: float, *, has_token: bool = True
) -> State:
    """Return the state in which LAUNCHER succeeds the coordinator that wrote RECORD.

    The job keeps its config. LOST_AT is when that coordinator was known to be lost; its own ranks
    had ended by then. The ranks of other hosts have ended when they join again, or as long after
    LOST_AT as those of any lost host.
    """
    config = record.config
    lost = [entry for entry in record.entries if entry.launcher == record.coordinator]
    failure_counts = {
        (entry_.host, entry_.hostname): entry_.failure_count for entry_ in record.others
    }
    if record.coordinator != launcher:
        failure_counts |= {
            (entry_.host, entry_.hostname): entry_.failure_count + 1 for entry_ in lost
        }
    failure = Failure(
        "".join(entry_.host for entry_ in lost[:1]),
        "the coordinator of the job was lost",
        LOST,
        is_departure=config.may_change,
    )
    state = begin(config, at, record.job, has_token=has_token)._replace(
        generation=record.generation + 1,
        restarts=record.restarts + (not config.may_change),
        # For hosts that are still in the last generation.
        verdict=Verdict(record.generation, record.coordinator, failure, is_final=False),
        failure_counts=failure_counts,
    )
    for order, entry in enumerate(record.entries):
        if entry.launcher == record.coordinator != launcher:
            continue
        host = Host(
            entry.launcher,
            JoinRequest(entry.host, entry.hostname, 0, (), ()),
            address="",
            is_local=entry.launcher == launcher,
            connection=None,
            heard_at=lost_at,
            joined_at=at,
            order=order,
            since=0,
            is_joined=False,
            failure_count=entry.failure_count,
        )
        state = with_host(state, host)
    return state


def record(state: State, roster: RosterMessage, coordinator: str) -> JobRecord:
    """Return what another coordinator must know of ROSTER, which COORDINATOR has made."""
    from fleetrun.session.jobrecord import JobRecord, RosterEntry  # only with etcd

    def entry(placed: Entry) -> RosterEntry:
        host = state.hosts.get(placed.launcher)
        count = 0 if host is None else host.failure_count
        return RosterEntry(placed.launcher, placed.host, placed.hostname, count)

    return JobRecord(
        state.session,
        roster.generation,
        roster.restarts,
        coordinator,
        tuple(map(entry, roster.entries)),
        state.config.told,
        tuple(RosterEntry("", *host, count) for host, count in state.failure_counts.items()),
    )


def host_ends(state: State) -> tuple[HostEnd, ...]:
    """Return how the hosts of the generation that STATE is in, or ended with, have ended."""
    ends: list[HostEnd] = []
    reports = {report.launcher: report.failure for report in state.reports.values()}
    verdict = state.verdict
    is_well = verdict is not None and verdict.failure is None
    for node_rank, entry in enumerate(() if state.roster is None else state.roster.entries):
        failure, host = reports.get(entry.launcher), state.hosts.get(entry.launcher)
        outcome, code = UNKNOWN, 1
        if failure is not None:
            outcome, code = failure.what, failure.exit_code
        elif is_well or (host is not None and host.is_done):
            outcome, code = SUCCEEDED, 0
        elif host is not None and host.is_stopped:
            outcome, code = STOPPED, 0
        ends.append(
            HostEnd(
                node_rank,
                entry.host,
                entry.hostname,
                len(entry.ports),
                outcome,
                code,
                is_first=verdict is not None and verdict.launcher == entry.launcher,
                is_victim=failure is not None and failure.is_victim,
            )
        )
    return tuple(ends)


def is_below_minimum(state: State) -> bool:
    """Whether hosts were lost and all remaining ones are here but too few."""
    is_begun = state.phase == FORMING and state.generation > 0
    is_short = len(state.here) == len(state.hosts) < state.config.least
    return bool(state.lost) and is_begun and is_short


def caller(state: State, connection: int) -> Host | None:
    """Return the host at the other end of CONNECTION if it has joined."""
    return state.hosts.get(state.connections.get(connection, ""))


def with_host(state: State, host: Host) -> State:
    """Return STATE with HOST added or replaced."""
    state = state._replace(hosts={**state.hosts, host.launcher: host})
    if host.connection is None or state.connections.get(host.connection) == host.launcher:
        return state
    return state._replace(connections={**state.connections, host.connection: host.launcher})


def without_host(state: State, host: Host) -> State:
    """Return STATE without HOST and its connection."""
    remaining = {name: other for name, other in state.hosts.items() if name != host.launcher}
    state = state._replace(hosts=remaining)
    if host.connection is None or state.connections.get(host.connection) != host.launcher:
        return state
    return without_connection(state, host.connection)


def without_connection(state: State, connection: int) -> State:
    """Return STATE without CONNECTION."""
    connections = dict(state.connections)
    connections.pop(connection, None)
    return state._replace(connections=connections)


def to_placed(state: State, message: FromCoordinator) -> Send:
    """Return the action that sends MESSAGE to all connected hosts of the roster."""
    placed = [state.hosts[launcher] for launcher in state.placed if launcher in state.hosts]
    return to_hosts(placed, message)


def to_hosts(hosts: Iterable[Host], message: FromCoordinator) -> Send:
    """Return the action that sends MESSAGE to those of HOSTS that are connected."""
    return Send(tuple(h.connection for h in hosts if h.connection is not None), message)
