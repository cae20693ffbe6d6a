"""A launcher's part in the session: it coordinates or calls the coordinator, joins, and obeys.

It has no phases of its own: the run policy gathers, runs and stops, and the coordinator tells it
when. One connection is one membership, from its Join to its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from fleetrun.run.events import Failure
from fleetrun.run.loop import Loop, Waiting, nothing
from fleetrun.run.policy import decide
from fleetrun.session import coordinator, exchange, messages
from fleetrun.session.codec import Codec
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.connecting import Dialer, Listener, PortTaken
from fleetrun.session.fence import Fence
from fleetrun.session.messages import (
    DONE,
    FAILED,
    READY,
    STOPPED,
    JoinRequest,
    Missing,
    RosterMessage,
    Verdict,
)
from fleetrun.session.serving import LocalLink, Server, SessionClock
from fleetrun.session.wire import Connection, Wire, ignore, job_key

# The most lines about refused callers and launchers that do not match.
_MOST_REMARKS = 64
# How long the delivery of the end of a rendezvous may take.
_FLUSH_S = 2.0
_NAME_BYTES = 8
# For all messages, in both directions.
CODEC = Codec(
    *(messages.FromMember | messages.FromCoordinator).__args__,
    *exchange.FromMember.__args__,
)


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

    def stop(self, failure: Failure) -> None:
        """Stop the ranks, and answer by `stopped`."""

    def stand_by(self) -> None:
        """Wait for a place while the job runs without this host."""

    def conclude(self, verdict: Verdict) -> None:
        """Take the verdict: end, or gather again."""


class RendezvousEndpoint(NamedTuple):
    """Where the launchers meet: at PORT of HOST.

    `addresses` are those to listen on if this launcher may be the coordinator, else empty.
    """

    config: RendezvousConfig
    host: str
    port: int
    job_id: str
    token: str | None = None
    addresses: tuple[str, ...] = ()
    # The hosts in the order of their ranks, if they are listed.
    names: tuple[str, ...] = ()
    # Whether another launcher on this very host may have been faster.
    may_be_second: bool = False
    # The addresses that may call, None: all.
    allowed: frozenset[str] | None = None

    @property
    def knows_callers(self) -> bool:
        """Whether only launchers of the job can call, by its token or from its hosts."""
        return self.token is not None or self.allowed is not None


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
        self.launcher, self.host = launcher, host
        self.handler: SessionHandler = SessionHandler()
        # Handlers of messages outside the protocol, by type; they get the sender's node rank.
        self.hearers: dict[type, Callable[[int, Any], None]] = {}
        self._endpoint, self._log, self._transport = endpoint, log, transport
        self._clock = SessionClock(transport.now)
        key = job_key(endpoint.job_id, endpoint.token)
        self._wire = Wire(key, CODEC, self._clock)
        self._fence = Fence(
            self._clock,
            endpoint.config,
            send=self.to_coordinator,
            stop=self._end_ranks,
            lose=self._lose_silent,
        )
        # Who coordinates, for people.
        self._coordinator = endpoint.host
        self._server: Server | None = None
        self._listener: Listener | None = None
        self._dialer: Dialer | None = None
        # The way to the coordinator, and if that is elsewhere, the connection, until it is closed.
        self._link: Connection | LocalLink | None = None
        self._connection: Connection | None = None
        # What it has asked for a place with, until it has one.
        self._join: messages.Join | None = None
        self._missing: Missing | None = None
        self.roster: RosterMessage | None = None
        # The last generation that has started here.
        self._last: messages.LastRun | None = None
        # Whether this host has a place in a generation that has not stopped here.
        self._is_placed = self._is_stopping = False
        self._is_over = self._has_left = self._is_closed = False
        # The failure here in this generation, and why there is no coordinator any more.
        self._own: Failure | None = None
        self._loss: Failure | None = None
        # A stop that came before ranks could be stopped.
        self._due: Failure | None = None
        self._printed: set[str] = set()

    # Beginning and end --------------------------------------------------------------------------

    @property
    def config(self) -> RendezvousConfig:
        """The job's config once it is known; before that, this host's own."""
        return self._fence.config

    @property
    def serves(self) -> bool:
        """Whether the coordinator is here."""
        return self._server is not None

    @property
    def is_connected(self) -> bool:
        """Whether there is a way to the coordinator."""
        return self._link is not None

    def open(self, waiting: Waiting) -> None:
        """Listen or call; raise EnvironmentFault if the port cannot be bound."""
        self._clock.move(waiting)
        if not self._coordinate():
            self._call(self._endpoint.host, self._endpoint.port)

    def _coordinate(self) -> bool:
        """Become the coordinator if this launcher may be and no other one is."""
        endpoint = self._endpoint
        if not endpoint.addresses:
            return False
        try:
            self._listen(endpoint.addresses)
        except PortTaken:
            if endpoint.may_be_second:
                return False
            raise
        self._serve(endpoint.host)
        return True

    def _listen(self, addresses: Sequence[str]) -> None:
        """Bind the port for the other hosts; raises EnvironmentFault."""
        listener = self._transport.listener(
            addresses,
            self._endpoint.port,
            self._wire,
            opened=self._take,
            refused=lambda address, why: self.shown(
                f"A connection from {address} was refused: {why}"
            ),
            allowed=self._endpoint.allowed,
        )
        listener.prepare()
        self._listener = listener

    def _take(self, connection: Connection) -> None:
        if self._server is not None:
            self._server.take(connection)

    def _serve(self, host: str) -> None:
        """Coordinate the job; the others reach this host as HOST."""
        assert self._listener is not None
        self._hang_up()
        session = os.urandom(_NAME_BYTES).hex() if self._last is None else self._last.session
        state = coordinator.State(
            self.config,
            session,
            self._clock.now(),
            self._endpoint.knows_callers,
            self._endpoint.names,
        )
        self._server = Server(
            self._clock,
            state,
            promise_s=self._promise_s,
            received=self._received,
            stepped=self._stepped,
        )
        if self._join is not None:
            self._listener.open()
        self._coordinator = host
        ours = LocalLink(self._clock, host)
        self._server.take(ours.peer)
        self._connect(ours)

    def _promise_s(self) -> float:
        """Return for how long nobody replaces this coordinator."""
        return inf

    def _stepped(self) -> None:
        """Look at what the coordinator knows now."""

    def _call(self, host: str, port: int) -> None:
        """Call the coordinator at PORT of HOST."""
        self._hang_up()
        self._dialer = self._transport.dialer(
            host, port, self._wire, opened=self._answered, closed=self._nobody_listens
        )
        self._dialer.begin()

    def _answered(self, connection: Connection) -> None:
        self._connection = connection
        self._connect(connection)

    def _nobody_listens(self) -> None:
        """Replace the launcher that had the port here, if it has ended before the job began."""
        if self._endpoint.may_be_second and self.roster is None and not self._is_closed:
            self._coordinate()

    def _connect(self, link: Connection | LocalLink) -> None:
        """Take part by LINK, which has just been opened."""
        self._disconnect()
        self._link = link
        link.heard, link.lost = self._hear, self._lost
        self._fence.connect()
        self._send_join()

    def _disconnect(self) -> None:
        """Hang up after what was sent."""
        link, self._link = self._link, None
        self._fence.disconnect()
        if link is not None:
            link.heard, link.lost = ignore, nothing
            link.finish()

    def _hang_up(self) -> None:
        """Neither call nor have a connection."""
        self._disconnect()
        if self._dialer is not None:
            self._dialer.close()
        self._dialer = self._connection = None

    def move(self, waiting: Waiting) -> None:
        """Continue in another share of the loop."""
        self._clock.move(waiting)

    def attend(self, handler: SessionHandler) -> None:
        """Let HANDLER carry out what is decided from now on."""
        self.handler = handler
        if self._due is not None and handler.has_ranks:
            failure, self._due = self._due, None
            self._clock.soon("due", partial(handler.stop, failure))

    def guard(self, kill_at: Callable[[float | None], None]) -> None:
        """Let KILL_AT kill the ranks at a moment, or None, when this launcher cannot."""
        self._fence.guard(kill_at)

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
        self.to_coordinator(messages.Leave(None if self._is_over else failure))
        self._disconnect()
        self._fence.close()
        if self._dialer is not None:
            self._dialer.close()

    def flush(self) -> None:
        """Deliver the last messages, for a short time, when no loop runs any more."""
        loop = Loop()
        self._clock.move(loop)
        until = time.monotonic() + _FLUSH_S
        while self.is_busy and time.monotonic() < until:
            loop.timer("flush", until, nothing)
            loop.turn()
        self.close()
        loop.close()

    def close(self) -> None:
        """End all connections."""
        self._is_closed = self._has_left = True
        if self._listener is not None:
            self._listener.close()
        connection = self._connection
        self._hang_up()
        if connection is not None:
            connection.close()
        if self._server is not None:
            self._server.close()
        self._clock.clear()

    # What this launcher reports -----------------------------------------------------------------

    def join(self, request: JoinRequest, failure: Failure | None = None) -> None:
        """Ask for a place in the next generation, or report in FAILURE why this host cannot."""
        self._join = messages.Join(request._replace(launcher=self.launcher), failure)
        self._missing = self._own = None
        if self._server is not None and self._listener is not None:
            # The coordinator's own host comes first, which the others must match.
            self._listener.open()
        self._send_join()

    def _send_join(self) -> None:
        if self._join is not None and self._link is not None:
            self._link.send(self._join._replace(last=self._last))
            self._fence.joined()

    def to_coordinator(self, message: messages.FromMember | exchange.FromMember) -> None:
        """Send MESSAGE to the coordinator's launcher, which may be this one."""
        if self._link is not None:
            self._link.send(message)

    @property
    def _generation(self) -> int:
        return 0 if self.roster is None else self.roster.generation

    def planned(self, failure: Failure | None) -> None:
        """Answer `plan`."""
        if failure is None:
            self.to_coordinator(messages.Report(self._generation, READY))
        else:
            self.stopped(failure)

    def done(self) -> None:
        """Report that all essential ranks of this host have succeeded."""
        self.to_coordinator(messages.Report(self._generation, DONE))

    def failed(self, failure: Failure) -> None:
        """Report that the generation has failed here."""
        if self._is_placed and not self._is_stopping and self._own is None:
            # Ranks may have been killed meanwhile because this launcher stood still.
            self._own = self._cut_off() if self._fence.was_killed() else failure
            self._is_stopping = True
            self.to_coordinator(messages.Report(self._generation, FAILED, self._own))

    def stopped(self, failure: Failure | None) -> None:
        """Report that no rank runs here any more, and the first failure here."""
        if not self._is_placed:
            return
        own = failure or self._own or self._loss
        if own is not None and self._fence.was_killed():
            own = self._cut_off()
        self._is_placed, self._own = False, own
        self._fence.stopped()
        self.to_coordinator(messages.Report(self._generation, STOPPED, own))
        if self._loss is not None:
            self._go_on_alone(self._loss)

    # What it is told ------------------------------------------------------------------------------

    def _hear(self, message: Any) -> None:  # noqa: ANN401 - any message
        match message:
            case messages.Acknowledged():
                self._fence.answered(message)
            case Missing():
                self._wait(message)
            case RosterMessage():
                self._prepare(message)
            case messages.Start(generation=generation) if self._is_current(generation):
                self._start()
            case messages.Stop(generation=generation, failure=failure) if self._is_current(
                generation
            ):
                self._stop(failure)
            case Verdict():
                self.judge(message)
            case messages.Refused(why=why):
                self._join = None
                self._disconnect()
                what = f"the coordinator refused this host: {why}"
                self._judge_alone(Failure(self._coordinator, what, messages.UNMET))
            case _:
                pass

    def _is_current(self, generation: int) -> bool:
        return self._is_placed and generation == self._generation

    def _wait(self, missing: Missing) -> None:
        """Show who is waited for."""
        self._obey(missing.config, missing.remarks)
        stands_by = missing.stands_by and not (self._missing and self._missing.stands_by)
        self._missing = missing
        if stands_by:
            self.handler.stand_by()

    def _obey(self, config: RendezvousConfig, remarks: Sequence[str]) -> None:
        """Adopt the job's config, and print once that it differs from what is asked for here."""
        if config != self.config:
            self._fence.obey(config)
            if config != self._endpoint.config:
                self.shown(
                    f"{self._coordinator} coordinates the job, and its --nnodes, --spares, "
                    "--max_restart, --grace and timeouts apply, which differ from those here"
                )
            self.handler.obey()
        for remark in remarks:
            self.shown(remark)

    def _prepare(self, roster: RosterMessage) -> None:
        """Plan this host's part."""
        self.roster, self._join, self._own = roster, None, None
        self._is_placed, self._is_stopping = True, False
        self._obey(roster.config, roster.remarks)
        self.handler.plan(roster)

    def _start(self) -> None:
        roster = self.roster
        assert roster is not None
        if not self._fence.start():
            self.stopped(self._cut_off())
            return
        hosts = len(roster.entries)
        self._last = messages.LastRun(roster.session, roster.generation, roster.restarts, hosts)
        self.handler.run()

    def _stop(self, failure: Failure) -> None:
        """Ask all ranks to end."""
        if not self._fence.may_run:
            self.stopped(None)
        elif not self._is_stopping:
            self._is_stopping = True
            if self.handler.has_ranks:
                self.handler.stop(failure)
            else:
                self._due = failure

    def judge(self, verdict: Verdict) -> None:
        """End, or gather again."""
        self._is_over = self._is_over or verdict.is_final
        self._is_placed, self._due = False, None
        self.handler.conclude(verdict)

    def _judge_alone(self, failure: Failure, launcher: str = "", given_up: str = "") -> None:
        self.judge(Verdict(self._generation, launcher, failure, True, given_up))  # noqa: FBT003

    # Without the coordinator ----------------------------------------------------------------------

    def _end_ranks(self) -> None:
        """Ask the ranks to end, as the coordinator is silent; the keeper kills the rest."""
        loss = self._cut_off()
        if not self._is_stopping:
            self.to_coordinator(messages.Report(self._generation, FAILED, loss))
        self._stop(loss)

    def _lose_silent(self) -> None:
        self._disconnect()
        self._lose(self._cut_off())

    def _lost(self) -> None:
        self._link = None
        self._fence.disconnect()
        self._lose(self._loss_of(self._coordinator, "the coordinator of the job was lost"))

    def _cut_off(self) -> Failure:
        """Return the failure that the coordinator and this launcher have lost each other."""
        what = f"fleetrun was cut off from the coordinator ({self._coordinator})"
        return self._loss_of(self.host, what)

    def _loss_of(self, where: str, what: str) -> Failure:
        # A victim, as a rank that loses a peer: a failure of its own on any host is the cause.
        may_change = self.config.may_change
        return Failure(where, what, messages.LOST, is_victim=True, is_departure=may_change)

    def _lose(self, failure: Failure) -> None:
        """End without the coordinator, or call it again before the job begins."""
        self._connection = None
        if self._is_over or self._has_left:
            return
        if self._is_placed:
            self._loss = failure
            self._stop(failure)
        elif self._may_seek():
            self._seek()
        else:
            self._go_on_alone(failure)

    def _may_seek(self) -> bool:
        """Whether a coordinator can still be found: nothing has begun here."""
        return self.roster is None and not (self._missing and self._missing.stands_by)

    def _seek(self) -> None:
        """Call the coordinator again."""
        if self._dialer is not None:
            self._dialer.begin()

    def _go_on_alone(self, loss: Failure) -> None:
        """Conclude for this host alone, as its coordinator is lost."""
        own, self._loss = self._own, None
        is_own = own is not None and not own.is_victim
        failure = own if own is not None and is_own else loss
        restarts = 0 if self.roster is None else self.roster.restarts
        decision = decide(
            failure.no_retry, restarts, self.config.max_restarts, is_departure=failure.is_departure
        )
        launcher, given_up = (self.launcher, loss.what) if is_own else ("", "")
        if decision.is_final or not self.config.has_store:
            self._judge_alone(failure, launcher, given_up)
        else:
            self.judge(Verdict(self._generation, launcher, failure, is_final=False))

    # Beside the protocol ------------------------------------------------------------------------

    def connected(self) -> tuple[int, ...]:
        """Return the node ranks of the other hosts that the coordinator can reach."""
        if self._server is None:
            return ()
        hosts = self._server.state.hosts.values()
        return tuple(sorted(h.place for h in hosts if h.place is not None and not h.is_local))

    def _received(self, node_rank: int, message: Any) -> None:  # noqa: ANN401 - any message
        """Pass on a message outside the protocol, from the host NODE_RANK or the coordinator."""
        hearer = self.hearers.get(type(message))
        if hearer is not None:
            hearer(node_rank, message)

    # For people ---------------------------------------------------------------------------------

    @property
    def has_told_all(self) -> bool:
        """Whether the coordinator is here and has told every host how the job ended."""
        server = self._server
        return server is not None and len(server.state.heard_end) >= self.config.most

    def missing(self) -> str:
        """Return what is awaited."""
        if not self.is_connected:
            dialer = self._dialer
            if dialer is not None and dialer.trouble:
                return f"the coordinator ({dialer.host}:{dialer.port}: {dialer.trouble})"
            return f"the coordinator at {self._coordinator}:{self._endpoint.port}"
        return "the other hosts" if self._missing is None else self._missing.who or "hosts"

    def shown(self, remark: str) -> None:
        """Print REMARK about the job's hosts, once."""
        if remark not in self._printed and len(self._printed) < _MOST_REMARKS:
            self._printed.add(remark)
            self._log(f"{remark}.")
