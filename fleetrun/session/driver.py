"""A launcher's part in the session: performs what the pure protocol decides."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from fleetrun.run.events import Failure, TimerExpired
from fleetrun.run.loop import Loop, LoopShare, Waiting, nothing
from fleetrun.rundir.hostsfile import HostEnd
from fleetrun.session import coordinator, exchange, member, messages, state
from fleetrun.session.authentication import Key
from fleetrun.session.callers import Callers
from fleetrun.session.codec import Codec
from fleetrun.session.config import RendezvousConfig, differences
from fleetrun.session.connection import HUNG_UP, Connection, Wire
from fleetrun.session.dialer import Dialer, Target
from fleetrun.session.listener import Listener, PortTaken
from fleetrun.session.loss import LossReport, PlaceRelease
from fleetrun.session.messages import (
    FromCoordinator,
    FromMember,
    Heartbeat,
    JoinRequest,
    Missing,
    RosterMessage,
    Verdict,
)


class GuardLink(Protocol):
    """The launcher's link to the guard, which goes on when it cannot."""

    def kill_at(self, at: float | None) -> None:
        """Kill the ranks at AT, unless another moment is named before."""

    def tell_at(self, target: Target) -> None:
        """Tell the coordinator at TARGET if this launcher is killed."""


class SessionHandler:
    """Carries out what the session decides; subclasses override what they need."""

    def obey(self) -> None:
        """Adopt the config of the job, which is now known."""

    def plan(self, roster: RosterMessage) -> None:
        """Plan the generation, and answer by `planned`."""

    def run(self) -> None:
        """Start the ranks."""

    def stop(self, failure: Failure, *, is_fenced: bool = False) -> None:
        """Stop the ranks, or kill them if IS_FENCED, and answer by `stopped`."""

    def stand_by(self) -> None:
        """Wait for a place while the job runs without this host."""

    def conclude(self, verdict: Verdict) -> None:
        """Take the verdict."""


# Stands for the connection of the coordinator's own launcher, which needs none.
_OWN = 0
# The most lines about refused callers, and about launchers that do not match.
_MOST_REFUSED, _MOST_REMARKS = 32, 64
# How long the delivery of the end of a rendezvous may take.
_FLUSH_S = 2.0
# For all messages, in both directions.
CODEC = Codec(
    *(messages.FromMember | messages.FromCoordinator).__args__,
    *(exchange.FromMember | exchange.FromCoordinator).__args__,
)


class RendezvousEndpoint(NamedTuple):
    """Where the launchers meet: at the first free one of PORTS of HOST.

    `addresses` are those to listen on if this launcher may be the coordinator, else empty.
    """

    config: RendezvousConfig
    host: str
    ports: tuple[int, ...]
    job_id: str
    token: str | None = None
    addresses: tuple[str, ...] = ()
    # Whether another launcher on this very host may have been faster.
    may_be_second: bool = False
    # The addresses that may call, and which of them this host calls from; None and empty: all.
    allowed: frozenset[str] | None = None
    source: str = ""


class Transport(NamedTuple):
    """How a session reaches the others, and its clock; those of a simulation are its own."""

    dialer: Callable[..., Dialer] = Dialer
    listener: Callable[..., Listener] = Listener
    clock: Callable[[], float] = time.monotonic


TRANSPORT = Transport()


class Session:
    """A launcher's part in the session: LAUNCHER is its unique name, HOST its name for people."""

    def __init__(
        self,
        endpoint: RendezvousEndpoint,
        launcher: str,
        *,
        host: str,
        log: Callable[[str], None],
        transport: Transport = TRANSPORT,
    ) -> None:
        self.launcher = launcher
        self.host = host
        self.handler: SessionHandler
        self._endpoint = endpoint
        # The name by which the others reach the coordinator, if it is here.
        self._own_host = endpoint.host
        self._log = log
        self._transport = transport
        self._clock = transport.clock
        # The session outlives the observers that lend it a share of the loop.
        self._share = LoopShare(None)
        self.key = Key(endpoint.job_id, endpoint.token)
        self._wire = Wire(self.key, CODEC, self._share, endpoint.source)
        self._listener: Listener | None = None
        # Who has the port on this host, if it is not this launcher.
        self._port_holder = ""
        self._dialer: Dialer | None = None
        self._targets: Sequence[Target] = ()
        self._connection: Connection | None = None
        self._callers = Callers(
            self._share, received=self._caller_received, lost=self._caller_lost, clock=self._clock
        )
        self._coordinator: state.State | None = None
        self._member: member.MemberState | None = None
        self._missing: Missing | None = None
        self._missing_at = 0.0
        # Remarks that were printed, and the addresses of refused callers.
        self._printed: set[str] = set()
        self._refused: set[str] = set()
        # Messages for a connection that opens after this launcher has left.
        self._last_words: tuple[FromMember, ...] = ()
        # Handlers of messages outside the protocol, by type; they get the sender's node rank.
        self.hearers: dict[type, Callable[[int, Any], None]] = {}
        # When the coordinator's last message arrived.
        self.heard_at = self._clock()
        # Called when it ends.
        self.closed: Callable[[], None] = nothing
        self._todo: deque[Callable[[], None]] = deque()
        self._is_working = False
        self._is_closed = False
        # When the guard kills the ranks of a stopped launcher, the coordinator to tell of our
        # death, the link to the guard, and whether that coordinator has hung up.
        self._kill_at: float | None = None
        self._connected_to: Target | None = None
        self._guard: GuardLink | None = None
        self._has_hung_up = False

    # Beginning and end --------------------------------------------------------------------------

    @property
    def config(self) -> RendezvousConfig:
        """The job's config once it is known; before that, this host's own."""
        return self._endpoint.config if self._member is None else self._member.config

    @property
    def serves(self) -> bool:
        """Whether the coordinator is here."""
        return self._coordinator is not None

    @property
    def may_hand_over(self) -> bool:
        """Whether another launcher can coordinate the job when this one leaves."""
        return False

    def open(self, waiting: Waiting) -> None:
        """Listen or call; raise EnvironmentFault if the port cannot be bound."""
        endpoint = self._endpoint
        self._share.move(waiting)
        self._member = member.begin(
            endpoint.config,
            self.launcher,
            endpoint.host,
            self._clock(),
            is_local=False,
        )
        if not self._coordinate():
            self._call([Target(endpoint.host, port) for port in endpoint.ports])

    def _coordinate(self) -> bool:
        """Become the coordinator if this launcher may be and no other one is."""
        endpoint, now = self._endpoint, self._clock()
        self._listener = self._listen(endpoint.addresses) if endpoint.addresses else None
        if self._listener is None or self._member is None:
            return False
        self._hang_up()
        self._member = self._member._replace(is_local=True)
        self._coordinator = state.begin(
            endpoint.config, now, self.launcher, has_token=self.key.has_token
        )
        self._listener.open()
        self._event(member.Connected(now))
        return True

    def _call(self, targets: Sequence[Target]) -> None:
        """Call the coordinator, which is at one of TARGETS."""
        self._targets = targets
        self._dialer = self._transport.dialer(
            targets, self._wire, opened=self._answered, closed=self._nobody_listens
        )
        self._dialer.begin()

    def _hang_up(self) -> None:
        if self._dialer is not None:
            self._dialer.hang_up()
        self._dialer = self._connection = None

    def _listen(self, addresses: Sequence[str]) -> Listener | None:
        endpoint, self._port_holder = self._endpoint, ""
        listener = self._transport.listener(
            addresses,
            endpoint.ports,
            self._wire,
            opened=self._callers.take,
            refused=self._caller_refused,
            allowed=endpoint.allowed,
        )
        try:
            listener.prepare()
        except PortTaken as taken:
            if not endpoint.may_be_second:
                raise
            self._port_holder = taken.holder
            return None
        return listener

    def move(self, waiting: Waiting) -> None:
        """Continue in another share of the loop."""
        self._share.move(waiting)

    @property
    def is_busy(self) -> bool:
        """Whether messages are still to be sent or received."""
        if self._is_closed:
            return False
        if self._coordinator is not None:
            return not self._coordinator.is_over
        if self._last_words and self._dialer is not None and self._dialer.is_calling:
            return True
        return self._connection is not None and self._connection.is_open

    def quit(self, failure: Failure | None) -> None:
        """Leave; before there is a verdict, FAILURE says why."""
        self._do(partial(self._quit, failure))

    def _quit(self, failure: Failure | None) -> None:
        if self._member is not None and self._member.phase == member.ENDED:
            self._send_own(messages.Leave(None))
        else:
            if not self.is_connected and self._member is not None:
                self._last_words = member.last_words(self._member, failure)
            self._feed(member.Said(messages.Leave(failure), self._clock()))
        # Hosts that are just connecting would otherwise wait for this one.
        if self._dialer is not None and not self._last_words:
            self._dialer.close()
        if self._connection is not None:
            self._connection.finish()

    def flush(self) -> None:
        """Deliver the last messages, for a short time, when no loop runs any more."""
        loop = Loop()
        self._share.move(loop)
        until = time.monotonic() + _FLUSH_S
        while self.is_busy and time.monotonic() < until:
            loop.timer("flush", until, nothing)
            loop.turn()
        self.close()
        loop.close()

    def close(self) -> None:
        """End all connections."""
        if not self._is_closed:
            self.closed()
        self._is_closed = True
        for timer in ("member", "coordinator"):
            self._share.timer((id(self), timer), None, nothing)
        if self._listener is not None:
            self._listener.close()
        self._hang_up()
        self._callers.close()

    def guard(self, link: GuardLink) -> None:
        """Tell the guard when to kill the ranks, and which coordinator to inform of our death."""
        self._guard = link
        if self._kill_at is not None:
            link.kill_at(self._kill_at)
        if self._connected_to is not None:
            link.tell_at(self._connected_to)

    def loss_report(self, waiting: Waiting, target: tuple[str, int]) -> LossReport | PlaceRelease:
        """Return the report that this launcher was killed, for the guard, its child."""
        wire = self._wire._replace(waiting=waiting)
        return LossReport(Target(*target), wire, launcher=self.launcher)

    # -- what this launcher reports ---------------------------------------------------------------

    def join(self, request: JoinRequest, failure: Failure | None = None) -> None:
        """Join the next generation, or report in FAILURE why this host cannot."""
        self._event(member.JoinRequested(request, self._clock(), failure))

    @property
    def _generation(self) -> int:
        return 0 if self._member is None else self._member.generation

    def _report(
        self, message: messages.HostReady | messages.Done | messages.Failed | messages.Stopped
    ) -> None:
        self._event(member.Said(message, self._clock()))

    def planned(self, failure: Failure | None) -> None:
        """Answer `plan`."""
        if failure is None:
            self._report(messages.HostReady(self._generation))
        else:
            self.stopped(failure)

    def done(self) -> None:
        """Report that all essential ranks of this host have succeeded."""
        self._report(messages.Done(self._generation))

    def failed(self, failure: Failure) -> None:
        """Report that the generation has failed here."""
        self._report(messages.Failed(self._generation, failure))

    def stopped(self, failure: Failure | None) -> None:
        """Report that no rank runs here any more, and the first failure here."""
        self._report(messages.Stopped(self._generation, failure))

    @property
    def has_told_all(self) -> bool:
        """Whether the coordinator is here and has told every host how the job ended."""
        known = self._coordinator
        return known is not None and len(known.heard_end) >= known.config.most

    @property
    def is_connected(self) -> bool:
        """Whether there is a way to the coordinator."""
        return self.serves or self._connection is not None

    def missing(self) -> str:
        """Return what is awaited."""
        if not self.is_connected:
            where = " or ".join(map(str, self._targets[:1]))
            trouble = "" if self._dialer is None else self._dialer.trouble
            if self._port_holder:
                trouble = f"{trouble or where}; on this host, {self._port_holder} has that port"
            return f"the coordinator ({trouble})" if trouble else f"the coordinator at {where}"
        return "the other hosts" if self._missing is None else self._missing.who

    def limit(self) -> tuple[str, float] | None:
        """Return the option that limits the coordinator's wait, and when that wait ends."""
        missing = self._missing
        if not self.is_connected or missing is None or not missing.limit:
            return None
        return missing.limit, self._missing_at + missing.left_s

    # Beside the protocol ------------------------------------------------------------------------

    def to_coordinator(self, message: exchange.FromMember | Heartbeat) -> None:
        """Send MESSAGE to the coordinator's launcher, which may be this one."""
        if self.serves:
            self._todo_later(type(message), self._own_rank(), message)
        elif self._connection is not None:
            self._connection.send(message)

    def to_member(self, node_rank: int, message: exchange.FromCoordinator) -> None:
        """Send MESSAGE to the launcher of a host, which may be this one; only the coordinator."""
        if self._coordinator is None or not 0 <= node_rank < len(self._coordinator.placed):
            return
        launcher = self._coordinator.placed[node_rank]
        host = self._coordinator.hosts.get(launcher)
        if launcher == self.launcher:
            self._todo_later(type(message), node_rank, message)
        elif host is not None and host.connection is not None:
            self._callers.send(host.connection, message)

    def connected(self) -> tuple[int, ...]:
        """Return the node ranks of the other hosts that the coordinator can reach."""
        if self._coordinator is None:
            return ()
        hosts = self._coordinator.hosts
        return tuple(
            node_rank
            for node_rank, launcher in enumerate(self._coordinator.placed)
            if launcher != self.launcher
            and launcher in hosts
            and hosts[launcher].connection is not None
        )

    def host_ends(self) -> tuple[HostEnd, ...]:
        """Return how the hosts of the last generation have ended, as far as is known here."""
        return () if self._coordinator is None else state.host_ends(self._coordinator)

    def _own_rank(self) -> int:
        placed = () if self._coordinator is None else self._coordinator.placed
        return placed.index(self.launcher) if self.launcher in placed else 0

    def _todo_later(self, kind: type, node_rank: int, message: tuple[object, ...]) -> None:
        handler = self.hearers.get(kind)
        if handler is not None:
            self._do(partial(handler, node_rank, message))

    # The wire -----------------------------------------------------------------------------------

    def _caller_received(
        self, number: int, caller: Connection, message: FromMember | exchange.FromMember
    ) -> None:
        now = self._clock()
        if isinstance(message, exchange.FromMember):
            host = None if self._coordinator is None else state.caller(self._coordinator, number)
            if host is not None and host.has_place:
                self._todo_later(type(message), host.order, message)
            return
        received = state.Received(
            number,
            message,
            now,
            caller.address,
            caller.local_address,
        )
        self._do(partial(self._feed_coordinator, received))

    def _caller_lost(self, number: int) -> None:
        self._do(partial(self._feed_coordinator, state.Broken(number, self._clock())))

    def _caller_refused(self, address: str, why: str) -> None:
        """Print that a connection was refused, once for each address."""
        if address not in self._refused and len(self._refused) < _MOST_REFUSED:
            self._refused.add(address)
            how = "refused"
            if why == HUNG_UP:
                # Before it has proved itself, so it may be any launcher.
                how, why = "closed there", "it has ended, or has another token or another --job_id"
            self._log(f"A connection from {address} was {how}: {why}.")

    def _answered(self, connection: Connection) -> None:
        """Take the connection to the coordinator."""
        self._connection = connection
        if self._last_words:
            for message in self._last_words:
                connection.send(message)
            connection.lost = self._lose
            connection.finish()
            return
        connection.heard = self._hear
        connection.lost = self._lose
        self._tell_at(Target(connection.address, connection.port))
        self._event(member.Connected(self._clock()))

    def _tell_at(self, target: Target) -> None:
        """Have the guard inform TARGET if this launcher is killed."""
        self._connected_to = target
        if self._guard is not None:
            self._guard.tell_at(target)

    def _hear(self, message: tuple[object, ...]) -> None:
        self.heard_at = self._clock()
        if isinstance(message, exchange.FromCoordinator):
            self._todo_later(type(message), 0, message)
        elif isinstance(message, messages.FromCoordinator):
            self._event(member.Heard(message, self._clock()))

    def _lose(self, why: str) -> None:
        self._connection = None
        self._has_hung_up = why == HUNG_UP
        self._event(member.Disconnected(self._clock()))

    def _nobody_listens(self, target: Target) -> None:
        """Go on without the coordinator at TARGET, or replace it before the job begins."""
        known = self._member
        if known is None or self._is_closed:
            return
        if self._endpoint.may_be_second and known.is_new:
            # The one that had the port has ended: it was killed, or its own job is over.
            self._coordinate()
        elif self._has_hung_up and target == self._connected_to:
            # Its launcher has ended: a firewall may refuse us, but closes no connection cleanly.
            self._event(member.Gone(self._clock()))

    # The protocol -------------------------------------------------------------------------------

    def _event(self, event: member.Event) -> None:
        self._do(partial(self._feed, event))

    def _do(self, call: Callable[[], None]) -> None:
        """Make CALL after the current one, so that each step sees the previous actions done."""
        self._todo.append(call)
        if self._is_working:
            return
        self._is_working = True
        try:
            while self._todo:
                self._todo.popleft()()
        finally:
            self._is_working = False
            self._todo.clear()
        self._set_timers()

    def _set_timers(self) -> None:
        if self._is_closed:
            return
        now = self._clock()
        if self._member is not None and self._member.phase != member.ENDED:
            due = max(now, self._member.wake_at)
            self._share.timer((id(self), "member"), due, self._member_elapsed)
        if self._coordinator is not None:
            due = max(now, self._coordinator.wake_at)
            self._share.timer((id(self), "coordinator"), due, self._coordinator_elapsed)

    def _member_elapsed(self) -> None:
        self._event(TimerExpired(self._clock()))

    def _coordinator_elapsed(self) -> None:
        elapsed = TimerExpired(self._clock())
        self._do(partial(self._feed_coordinator, elapsed))

    def _feed(self, event: member.Event) -> None:
        if self._member is None:
            return
        requested = self._member.config
        self._member, actions = member.step(self._member, event)
        if self._member.config != requested:
            self._obey(requested, self._member.config)
        for action in actions:
            self._perform(action)

    def _obey(self, requested: RendezvousConfig, config: RendezvousConfig) -> None:
        """Adopt the CONFIG of the job, and print how it differs from what is REQUESTED here."""
        differing = differences(requested, config)
        if differing and self._member is not None:
            where = self._member.coordinator
            self.shown(
                f"{where} coordinates the job, and its options apply: {', '.join(differing)}"
            )
        self.handler.obey()

    def _perform(self, action: member.Action) -> None:
        match action:
            case member.SendToCoordinator(message=message):
                self._send_own(message)
            case member.Redial():
                self._connection = None
                if self._dialer is not None:
                    self._dialer.begin()
            case member.Deliver(message=messages.Missing() as missing):
                # At once: progress lines ask who is missing.
                self._show(missing)
            case member.Deliver(message=order):
                self._todo.append(partial(self._deliver, order))
            case member.Fence(failure=failure):
                self._todo.append(partial(self.handler.stop, failure, is_fenced=True))
            case member.KillAt(at=at):
                self._kill_at = at
                if self._guard is not None:
                    self._guard.kill_at(at)

    def _deliver(
        self, message: RosterMessage | messages.Start | messages.Stop | Verdict | Missing
    ) -> None:
        """Pass an order of the coordinator to the handler."""
        match message:
            case messages.RosterMessage():
                self._plan(message)
            case messages.Start():
                self.handler.run()
            case messages.Stop(failure=failure):
                self.handler.stop(failure)
            case messages.Verdict():
                self.handler.conclude(message)
            case _:
                self._show(message)

    def _plan(self, roster: RosterMessage) -> None:
        for remark in roster.remarks:
            self.shown(remark)
        self.handler.plan(roster)

    def _show(self, missing: Missing) -> None:
        if missing.stands_by and not (self._missing is not None and self._missing.stands_by):
            self._todo.append(self.handler.stand_by)
        self._missing, self._missing_at = missing, self._clock()
        for remark in missing.remarks:
            self.shown(remark)

    def shown(self, remark: str) -> None:
        """Print REMARK about the job's hosts, once."""
        if remark not in self._printed and len(self._printed) < _MOST_REMARKS:
            self._printed.add(remark)
            self._log(f"{remark}.")

    def _send_own(self, message: FromMember) -> None:
        if self._coordinator is not None:
            now, host = self._clock(), self._own_host
            received = state.Received(_OWN, message, now, host, is_local=True)
            self._todo.append(partial(self._feed_coordinator, received))
        elif self._connection is not None:
            self._connection.send(message)

    def _feed_coordinator(self, event: state.Event) -> None:
        if self._coordinator is None:
            return
        self._coordinator, actions = coordinator.step(self._coordinator, event)
        for action in actions:
            match action:
                case state.Send(connections=connections, message=message):
                    for number in connections:
                        self._send(number, message)
                case state.Close(connection=connection):
                    self._callers.finish(connection)

    def _send(self, number: int, message: FromCoordinator) -> None:
        if number == _OWN:
            arrival = member.Heard(message, self._clock())
            self._todo.append(partial(self._feed, arrival))
        else:
            self._callers.send(number, message)
