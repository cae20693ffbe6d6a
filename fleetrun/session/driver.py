"""A launcher's part in the session: connections, the coordinator if it is here, the membership."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

from fleetrun.run.events import Failure
from fleetrun.run.loop import Loop, Waiting, nothing
from fleetrun.run.policy import decide
from fleetrun.rundir.hostsfile import HostEnd
from fleetrun.session import coordinator, exchange, messages
from fleetrun.session.authentication import Key
from fleetrun.session.callers import LocalLink, Server, SessionClock
from fleetrun.session.codec import Codec
from fleetrun.session.config import RendezvousConfig, differences
from fleetrun.session.connection import HUNG_UP, Connection, Wire
from fleetrun.session.dialer import Dialer, Target
from fleetrun.session.listener import Listener, PortTaken
from fleetrun.session.membership import Membership
from fleetrun.session.messages import (
    Done,
    Failed,
    HostReady,
    JoinRequest,
    Missing,
    RosterMessage,
    Stopped,
    Verdict,
)


class GuardLink(Protocol):
    """What goes on when the launcher cannot."""

    def kill_at(self, at: float | None) -> None:
        """Kill the ranks at AT, unless another moment is named before."""


class SessionHandler:
    """Carries out what the session decides; subclasses override what they need."""

    # Whether it has ranks, which it can stop.
    has_ranks = False

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


# The most lines about refused callers, and about launchers that do not match.
_MOST_REFUSED, _MOST_REMARKS = 32, 64
# How long the delivery of the end of a rendezvous may take.
_FLUSH_S = 2.0
_NAME_BYTES = 8
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
    now: Callable[[], float] = time.monotonic


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
        self.handler: SessionHandler = SessionHandler()
        self._endpoint = endpoint
        self._log = log
        self._transport = transport
        self._share = SessionClock(transport.now)
        self.key = Key(endpoint.job_id, endpoint.token)
        self._wire = Wire(self.key, CODEC, self._share, endpoint.source)
        self._member = Membership(self._share, launcher, self, endpoint.config)
        self._member.coordinator, self._member.host = endpoint.host, host
        self._server: Server | None = None
        self._listener: Listener | None = None
        # Who has the port on this host, if it is not this launcher.
        self._port_holder = ""
        self._dialer: Dialer | None = None
        self._target: Target | None = None
        self._connection: Connection | None = None
        # What it has asked for a place with, until it has one.
        self._request: tuple[JoinRequest, Failure | None] | None = None
        self._missing: Missing | None = None
        self._missing_at = 0.0
        # Whether this host has a place in a generation that has not stopped here.
        self._is_placed = self._is_stopping = False
        self._is_over = self._has_left = self._is_closed = False
        # The failure here in this generation, and why there is no coordinator any more.
        self._own: Failure | None = None
        self._is_done = self._is_done_held = False
        self._loss: Failure | None = None
        # A stop that came before ranks could be stopped.
        self._due: tuple[Failure, bool] | None = None
        # Remarks that were printed, and the addresses of refused callers.
        self._printed: set[str] = set()
        self._refused: set[str] = set()
        # Handlers of messages outside the protocol, by type; they get the sender's node rank.
        self.hearers: dict[type, Callable[[int, Any], None]] = {}
        self._kill_at: float | None = None
        self._guard: GuardLink | None = None

    # Whether another coordinator can be found when this one is lost.
    may_follow = False

    # Beginning and end --------------------------------------------------------------------------

    @property
    def config(self) -> RendezvousConfig:
        """The job's config once it is known; before that, this host's own."""
        return self._member.config

    @property
    def serves(self) -> bool:
        """Whether the coordinator is here."""
        return self._server is not None

    @property
    def may_hand_over(self) -> bool:
        """Whether another launcher can coordinate the job when this one leaves."""
        return False

    def open(self, waiting: Waiting) -> None:
        """Listen or call; raise EnvironmentFault if the port cannot be bound."""
        self._share.move(waiting)
        if not self._coordinate():
            endpoint = self._endpoint
            self._call([Target(endpoint.host, port) for port in endpoint.ports])

    def _coordinate(self) -> bool:
        """Become the coordinator if this launcher may be and no other one is."""
        endpoint = self._endpoint
        if not endpoint.addresses or not self._listen(endpoint.addresses):
            return False
        self._serve(endpoint.host)
        return True

    def _serve(self, host: str) -> None:
        """Coordinate the job; the others reach this host as HOST."""
        assert self._listener is not None
        self._hang_up()
        last = self._member.last
        name = os.urandom(_NAME_BYTES).hex() if last is None else last.session
        state = coordinator.begin(
            self.config, name, self._share.now(), has_token=self.key.has_token
        )
        self._server = Server(self._share, state, promise_s=self._promise_s, received=self.received)
        self._server.stepped = self._stepped
        self._listener.open()
        ours, theirs = LocalLink(self._share, host), LocalLink(self._share, host)
        ours.peer, theirs.peer = theirs, ours
        self._server.take(theirs)
        self._member.coordinator = host
        self._member.connect(ours)

    def _promise_s(self) -> float:
        """Return for how long nobody replaces this coordinator."""
        return inf

    def _stepped(self) -> None:
        """Look at what the coordinator knows now."""

    def _call(self, targets: Sequence[Target]) -> None:
        """Call the coordinator, which is at one of TARGETS."""
        self._hang_up()
        self._target = targets[0]
        self._dialer = self._transport.dialer(
            targets, self._wire, opened=self._answered, closed=self._nobody_listens
        )
        self._dialer.begin()

    def _hang_up(self) -> None:
        """Neither call nor have a connection."""
        self._member.disconnect()
        if self._dialer is not None:
            self._dialer.hang_up()
        self._dialer = self._connection = None

    def _listen(self, addresses: Sequence[str]) -> bool:
        """Bind a port for the other hosts; False if another launcher may have it."""
        endpoint, self._port_holder = self._endpoint, ""
        listener = self._transport.listener(
            addresses,
            endpoint.ports,
            self._wire,
            opened=self._take,
            refused=self._caller_refused,
            allowed=endpoint.allowed,
        )
        try:
            listener.prepare()
        except PortTaken as taken:
            if not endpoint.may_be_second:
                raise
            self._port_holder = taken.holder
            return False
        self._listener = listener
        return True

    def _take(self, connection: Connection) -> None:
        if self._server is not None:
            self._server.take(connection)

    def move(self, waiting: Waiting) -> None:
        """Continue in another share of the loop."""
        self._share.move(waiting)

    def attend(self, handler: SessionHandler) -> None:
        """Let HANDLER carry out what is decided from now on."""
        self.handler = handler
        if self._due is not None and handler.has_ranks:
            (failure, is_fenced), self._due = self._due, None
            stop = partial(handler.stop, failure, is_fenced=is_fenced)
            self._share.soon("due", stop)

    @property
    def is_busy(self) -> bool:
        """Whether messages are still to be sent or received."""
        if self._is_closed:
            return False
        if self._server is not None:
            return not self._server.is_over
        return self._connection is not None and self._connection.is_open

    def quit(self, failure: Failure | None) -> None:
        """Leave; before there is a verdict, FAILURE says why."""
        if self._has_left:
            return
        self._has_left = True
        self._member.leave(None if self._is_over else failure)
        if self._dialer is not None:
            self._dialer.close()

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
        self._is_closed = True
        self._has_left = True
        if self._listener is not None:
            self._listener.close()
        self._hang_up()
        if self._server is not None:
            self._server.close()
        self._share.clear()

    def guard(self, link: GuardLink) -> None:
        """Let LINK kill the ranks when this launcher cannot."""
        self._guard = link
        link.kill_at(self._kill_at)

    # What this launcher reports -----------------------------------------------------------------

    def join(self, request: JoinRequest, failure: Failure | None = None) -> None:
        """Join the next generation, or report in FAILURE why this host cannot."""
        self._request, self._missing = (request, failure), None
        self._own = None
        self._is_done = False
        self._member.join(request, failure)

    @property
    def _generation(self) -> int:
        roster = self._member.roster
        return 0 if roster is None else roster.generation

    def planned(self, failure: Failure | None) -> None:
        """Answer `plan`."""
        if failure is None:
            self._member.say(HostReady(self._generation))
        else:
            self.stopped(failure)

    def done(self) -> None:
        """Report that all essential ranks of this host have succeeded, unless that is held."""
        self._is_done = True
        if not self._is_done_held:
            self._member.say(Done(self._generation))

    def hold_done(self, *, is_held: bool) -> None:
        """Keep `done` back while what the ranks have done may still fail the job."""
        self._is_done_held = is_held
        if self._is_done and not is_held:
            self.done()

    def failed(self, failure: Failure) -> None:
        """Report that the generation has failed here."""
        if self._is_placed and not self._is_stopping and self._own is None:
            self._own, self._is_stopping = failure, True
            self._member.say(Failed(self._generation, failure))

    def stopped(self, failure: Failure | None) -> None:
        """Report that no rank runs here any more, and the first failure here."""
        if not self._is_placed:
            return
        self._is_placed = False
        self._own = failure or self._own or self._loss
        self._member.say(Stopped(self._generation, self._own))
        if self._loss is not None:
            self._go_on_alone(self._loss)

    # What it is told ------------------------------------------------------------------------------

    @property
    def has_told_all(self) -> bool:
        """Whether the coordinator is here and has told every host how the job ended."""
        server = self._server
        return server is not None and len(server.state.heard_end) >= self.config.most

    @property
    def is_connected(self) -> bool:
        """Whether there is a way to the coordinator."""
        return self._member.is_connected

    def missing(self) -> str:
        """Return what is awaited."""
        if not self.is_connected:
            where = "" if self._target is None else str(self._target)
            trouble = "" if self._dialer is None else self._dialer.trouble
            if self._port_holder:
                trouble = f"{trouble or where}; on this host, {self._port_holder} has that port"
            return f"the coordinator ({trouble})" if trouble else f"the coordinator at {where}"
        return "the other hosts" if self._missing is None else self._missing.who or "hosts"

    def limit(self) -> tuple[str, float] | None:
        """Return the option that limits the coordinator's wait, and when that wait ends."""
        missing = self._missing
        if not self.is_connected or missing is None or not missing.limit:
            return None
        return missing.limit, self._missing_at + missing.left_s

    def shown(self, remark: str) -> None:
        """Print REMARK about the job's hosts, once."""
        if remark not in self._printed and len(self._printed) < _MOST_REMARKS:
            self._printed.add(remark)
            self._log(f"{remark}.")

    # As the policy of its membership

    def wait(self, missing: Missing) -> None:
        """Show who is waited for."""
        self._obey()
        stands_by = missing.stands_by and not (self._missing and self._missing.stands_by)
        self._missing, self._missing_at = missing, self._share.now()
        for remark in missing.remarks:
            self.shown(remark)
        if stands_by:
            self.handler.stand_by()

    _obeyed: RendezvousConfig | None = None

    def _obey(self) -> None:
        """Print once how the job's config differs from what is asked for here."""
        config = self._member.config
        if self._obeyed == config:
            return
        self._obeyed = config
        differing = differences(self._endpoint.config, config)
        if differing:
            where = self._member.coordinator
            self.shown(
                f"{where} coordinates the job, and its options apply: {', '.join(differing)}"
            )
        self.handler.obey()

    def prepare(self, roster: RosterMessage) -> None:
        """Plan this host's part."""
        self._obey()
        self._request, self._own = None, None
        self._is_placed, self._is_stopping = True, False
        for remark in roster.remarks:
            self.shown(remark)
        self.handler.plan(roster)

    def start(self, _: RosterMessage) -> None:
        """Start the ranks."""
        self.handler.run()

    def stop(self, failure: Failure, *, is_fenced: bool = False) -> None:
        """Ask all ranks to end."""
        if not self._member.may_run:
            self.stopped(None)
            return
        if self._is_stopping and not is_fenced:
            return
        self._is_stopping = True
        if self.handler.has_ranks:
            self.handler.stop(failure, is_fenced=is_fenced)
        else:
            self._due = failure, is_fenced

    def kill(self, failure: Failure) -> None:
        """Kill all ranks now."""
        self.stop(failure, is_fenced=True)

    def kill_at(self, at: float | None) -> None:
        """Have the ranks killed at that moment even if this launcher stands still."""
        self._kill_at = at
        if self._guard is not None:
            self._guard.kill_at(at)

    def judge(self, verdict: Verdict) -> None:
        """End, or gather again."""
        self._is_over = self._is_over or verdict.is_final
        self._is_placed = False
        self._due = None
        self.handler.conclude(verdict)

    def refuse(self, why: str) -> None:
        """End: the job takes place without this host."""
        what = f"the coordinator refused this host: {why}"
        failure = Failure(self._member.coordinator, what, messages.UNMET)
        self.judge(Verdict(self._generation, "", failure, is_final=True))

    def lose(self, failure: Failure) -> None:
        """End without the coordinator, or call it again before the job begins."""
        self._connection = None
        if self._is_over or self._has_left:
            return
        if self._is_placed:
            self._loss = failure
            if self._member.may_run:
                self.stop(failure)
            else:
                self.stopped(None)
        else:
            self._without_coordinator(failure)

    def _without_coordinator(self, failure: Failure) -> None:
        """Look for another coordinator while nothing runs here, or end because of FAILURE."""
        if self._member.roster is None and not (self._missing and self._missing.stands_by):
            self._seek()
        else:
            self._go_on_alone(failure)

    def _seek(self) -> None:
        """Call the coordinator again."""
        if self._dialer is not None:
            self._dialer.begin()

    def _go_on_alone(self, loss: Failure) -> None:
        """Conclude for this host alone, as its coordinator is lost."""
        own, launcher, given_up = self._own, "", ""
        self._loss = None
        failure = loss
        if own is not None and not own.is_victim:
            failure, launcher, given_up = own, self.launcher, loss.what
        roster, most = self._member.roster, self.config.max_restarts
        restarts = 0 if roster is None else roster.restarts
        is_departure = failure.is_departure
        is_last = decide(failure.no_retry, restarts, most, is_departure=is_departure).is_final
        is_final = is_last or not self.may_follow
        given_up = given_up if is_final else ""
        self.judge(Verdict(self._generation, launcher, failure, is_final, given_up))

    # Beside the protocol ------------------------------------------------------------------------

    def to_coordinator(self, message: exchange.FromMember) -> None:
        """Send MESSAGE to the coordinator's launcher, which may be this one."""
        if self._server is not None:
            self._hear_later(self._own_rank(), message)
        elif self._connection is not None:
            self._connection.send(message)

    def to_member(self, node_rank: int, message: exchange.FromCoordinator) -> None:
        """Send MESSAGE to the launcher of a host, which may be this one; only the coordinator."""
        link = None if self._server is None else self._server.link_of(node_rank)
        if isinstance(link, LocalLink):
            self._hear_later(node_rank, message)
        elif link is not None:
            link.send(message)

    def connected(self) -> tuple[int, ...]:
        """Return the node ranks of the other hosts that the coordinator can reach."""
        if self._server is None:
            return ()
        hosts = self._server.state.hosts.values()
        return tuple(sorted(h.place for h in hosts if h.place is not None and not h.is_local))

    def host_ends(self) -> tuple[HostEnd, ...]:
        """Return how the hosts of the last generation have ended, as far as is known here."""
        return () if self._server is None else coordinator.host_ends(self._server.state)

    def _own_rank(self) -> int:
        local = None if self._server is None else self._server.state.local
        return (0 if local is None else local.place) or 0

    def received(self, node_rank: int, message: Any) -> None:  # noqa: ANN401 - any message
        """Pass on a message outside the protocol, from the host NODE_RANK or the coordinator."""
        hearer = self.hearers.get(type(message))
        if hearer is not None:
            hearer(node_rank, message)

    def _hear_later(self, node_rank: int, message: Any) -> None:  # noqa: ANN401 - any message
        key = (id(self), "hear", id(message))
        self._share.soon(key, partial(self.received, node_rank, message))

    # The connection -----------------------------------------------------------------------------

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
        self._member.connect(connection)

    def _nobody_listens(self, _: Target) -> None:
        """Replace the launcher that had the port here, if it has ended before the job began."""
        if self._endpoint.may_be_second and self._member.roster is None and not self._is_closed:
            self._coordinate()
