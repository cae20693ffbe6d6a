"""A launcher's part in the session: it coordinates or calls the coordinator, joins, and obeys.

It has no phases of its own: the run policy gathers, runs and stops, and the coordinator tells it
when. One connection is one membership, from its Join to its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

from fleetrun.run.events import Failure
from fleetrun.run.loop import Loop, Waiting, nothing
from fleetrun.run.policy import decide
from fleetrun.session import coordinator, messages
from fleetrun.session.codec import Codec
from fleetrun.session.connecting import Dialer, Listener, PortTaken
from fleetrun.session.coordinator import ENDED, FORMING
from fleetrun.session.fence import Fence
from fleetrun.session.messages import FAILED, STOPPED, RendezvousConfig, RosterMessage, Verdict
from fleetrun.session.serving import LocalLink, Server, SessionClock
from fleetrun.session.wire import Connection, Wire, ignore, job_key

# The most lines about refused callers and launchers that do not match.
_MOST_REMARKS = 64
# How long the delivery of the end of a rendezvous may take.
_FLUSH_S = 2.0
# The pause between two attempts to stop ranks that are being started.
_AGAIN_S = 0.05
# For all messages, in both directions.
CODEC = Codec(*(messages.FromMember | messages.FromCoordinator | messages.Aside).__args__)


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

    def look_again(self) -> None:
        """Wait for a coordinator, with a limit even if this host stood by."""

    def conclude(self, verdict: Verdict) -> None:
        """Take the verdict: end, or gather again."""


class RendezvousEndpoint(NamedTuple):
    """Where the launchers meet: at PORT of HOST."""

    config: RendezvousConfig
    host: str
    port: int
    job_id: str
    token: str | None = None
    # The address to listen on if this launcher may be the coordinator, else empty.
    address: str = ""
    # The hosts in the order of their ranks, if they are listed.
    names: tuple[str, ...] = ()
    # The addresses that may call; None: all.
    allowed: frozenset[str] | None = None


class Standing(IntEnum):
    """Where a launcher stands; WAITING: no rank of a generation runs here, or none any more."""

    WAITING = 0
    PLACED = 1
    STOPPING = 2
    OVER = 3
    LEFT = 4


class _Coordination(Protocol):
    """Says who coordinates the job: this launcher, another one that is called, or nobody."""

    def seek(self) -> None: ...
    def settle(self) -> None: ...
    def left_s(self) -> float: ...
    def release(self, state: coordinator.State) -> None: ...
    def missing(self) -> str: ...
    def is_busy(self) -> bool: ...
    def close(self) -> None: ...


class Session:
    """A launcher's part in the session: LAUNCHER is its unique name, HOST its name for people.

    ELECT makes the election of the coordinator, if there is one. The rest is for simulations.
    """

    def __init__(
        self,
        endpoint: RendezvousEndpoint,
        launcher: str,
        *,
        host: str,
        log: Callable[[str], None],
        elect: Callable[[Session, SessionClock], _Coordination] | None = None,
        dialer: Callable[..., Dialer] = Dialer,
        listener: Callable[..., Listener] = Listener,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint, self.launcher, self.host = endpoint, launcher, host
        self.handler: SessionHandler = SessionHandler()
        # Handlers of messages outside the protocol, by type; they get the sender's node rank.
        self.hearers: dict[type, Callable[[int, Any], None]] = {}
        # The coordinator, if it is here.
        self.server: Server | None = None
        self.roster: RosterMessage | None = None
        self._log, self._make_dialer, self._make_listener = log, dialer, listener
        self._clock = clock = SessionClock(now)
        key = job_key(endpoint.job_id, endpoint.token)
        self._wire = Wire(key, CODEC, clock)
        self._fence = Fence(
            clock, endpoint.config, self.to_coordinator, self._end_ranks, self._lose
        )
        # Continues in another share of the loop; lets the keeper kill the ranks at a moment.
        self.move, self.guard = clock.move, self._fence.guard
        self._election = None if elect is None else elect(self, clock)
        # Who coordinates, for people.
        self._coordinator = endpoint.host
        self._dialer: Dialer | None = None
        # The way to the coordinator, if there is one; and the last one, until it is closed.
        self.link: Connection | LocalLink | None = None
        self._connection: Connection | LocalLink | None = None
        # What it has asked for a place with, until it has one.
        self._join: messages.Join | None = None
        self._missing: messages.Missing | None = None
        # The last generation that has started here.
        self._last: messages.LastRun | None = None
        self._standing = Standing.WAITING
        # The failure here in this generation, and why there is no coordinator any more.
        self._own: Failure | None = None
        self._loss: Failure | None = None
        self._printed: set[str] = set()

    @property
    def config(self) -> RendezvousConfig:
        """The job's config once it is known; before that, this host's own."""
        return self._fence.config

    @property
    def serves(self) -> bool:
        """Whether the coordinator is here."""
        return self.server is not None

    @property
    def may_coordinate(self) -> bool:
        """Whether nothing runs here, and this host asks for a place."""
        is_waiting = self._standing is Standing.WAITING
        return is_waiting and self._join is not None and self._join.failure is None

    def open(self, waiting: Waiting) -> None:
        """Listen or call; raise EnvironmentFault if the port cannot be bound."""
        self.move(waiting)
        endpoint = self.endpoint
        if self._election is not None:
            self._election.seek()
            return
        try:
            if endpoint.address:
                self.serve(endpoint.host, self.listen(endpoint.address))
                return
        except PortTaken:
            # Another launcher on this very host may have been faster, unless hosts are listed.
            if endpoint.names:
                raise
        self.call(endpoint.host, endpoint.port)

    def listen(self, address: str) -> Listener:
        """Bind the port for the other hosts; raises EnvironmentFault."""
        refused, allowed = self.shown, self.endpoint.allowed
        return self._make_listener(
            address, self.endpoint.port, self._wire, refused=refused, allowed=allowed
        )

    def serve(self, host: str, listener: Listener) -> None:
        """Coordinate the job; the others reach LISTENER at HOST."""
        self._hang_up()
        session = os.urandom(8).hex()
        if self._last is not None:
            session = self._last.session
            self._log("This host coordinates the job from now on.")
        endpoint, election, now = self.endpoint, self._election, self._clock.now()
        is_safe = endpoint.token is not None or endpoint.allowed is not None
        state = coordinator.State(self.config, session, now, is_safe, endpoint.names)
        promise_s = (lambda: inf) if election is None else election.left_s
        self.server = Server(self._clock, state, listener, promise_s, self.hearers)
        self._coordinator = host
        ours = LocalLink(self._clock, host)
        self.server.take(ours.peer)
        self._connect(ours)

    def _serve_no_more(self) -> None:
        server, self.server = self.server, None
        self._hang_up()
        if server is not None:
            server.finish()

    def resign(self, why: str) -> None:
        """Stop coordinating: another launcher may, when the lease is over."""
        self.shown(f"This host no longer coordinates the job: {why}")
        self._serve_no_more()
        self._lose()

    def call(self, host: str, port: int) -> None:
        """Call the coordinator at PORT of HOST."""
        self._hang_up()
        self._coordinator = host
        self._dialer = self._make_dialer(host, port, self._wire, opened=self._connect)
        self._dialer.begin()

    def _connect(self, link: Connection | LocalLink) -> None:
        if self._election is not None:
            self._election.settle()
        self._disconnect()
        self.link = self._connection = link
        link.heard, link.lost = self._hear, self._lost
        self._send_join()

    def _disconnect(self) -> None:
        link, self.link = self.link, None
        self._fence.disconnect()
        if link is not None:
            link.heard, link.lost = ignore, nothing
            link.finish()

    def _hang_up(self) -> None:
        self._disconnect()
        if self._dialer is not None:
            self._dialer.close()
            self._dialer = None

    @property
    def is_busy(self) -> bool:
        """Whether messages are still to be sent or received, or the end is being stored."""
        state = None if self.server is None else self.server.state
        if state is not None and (state.phase != ENDED or state.hosts):
            # Not all have heard how the job ended, and left.
            return True
        is_storing = self._election is not None and self._election.is_busy()
        return is_storing or (self._connection is not None and self._connection.is_open)

    def quit(self, failure: Failure | None) -> None:
        """Leave; before there is a verdict, FAILURE says why."""
        if self._standing is Standing.LEFT:
            return
        is_over, self._standing = self._standing is Standing.OVER, Standing.LEFT
        server, election = self.server, self._election
        if election is not None:
            election.settle()
        if election is not None and server is not None and not is_over:
            state = server.state
            is_idle = state.phase in {FORMING, ENDED} and self._clock.now() >= state.not_before
            if failure is not None and failure.is_departure and state.phase == FORMING:
                # It leaves the job to the others.
                self._serve_no_more()
            if is_idle:
                election.release(state)
        self.to_coordinator(messages.Leave(None if is_over else failure))
        self._disconnect()
        if self._dialer is not None:
            self._dialer.close()

    def flush(self) -> None:
        """Deliver the last messages, for a short time, when no loop runs any more."""
        loop = Loop()
        self.move(loop)
        until = time.monotonic() + _FLUSH_S
        while self.is_busy and time.monotonic() < until:
            loop.timer("flush", until, nothing)
            loop.turn()
        self.close()
        loop.close()

    def close(self) -> None:
        """End all connections."""
        self._standing = Standing.LEFT
        links = [] if self.server is None else list(self.server.links.values())
        self._serve_no_more()
        for link in (*links, self._connection):
            if link is not None:
                link.close()
        if self._election is not None:
            self._election.close()
        self._clock.clear()

    def join(self, request: messages.JoinRequest, failure: Failure | None = None) -> None:
        """Ask for a place in the next generation, or report in FAILURE why this host cannot."""
        self._join = messages.Join(request._replace(launcher=self.launcher), failure)
        self._missing = self._own = None
        self._send_join()
        if self._election is not None and self.link is None:
            self._election.seek()

    def _send_join(self) -> None:
        if self._join is not None and self.link is not None:
            self.link.send(self._join._replace(last=self._last))
            self._fence.joined()

    def to_coordinator(self, message: messages.FromMember | messages.Aside) -> None:
        """Send MESSAGE to the coordinator's launcher, which may be this one."""
        if self.link is not None:
            self.link.send(message)

    def report(self, stage: str, failure: Failure | None = None) -> None:
        """Report what has become of the generation here."""
        self.to_coordinator(messages.Report(self._generation, stage, failure))

    @property
    def _generation(self) -> int:
        return 0 if self.roster is None else self.roster.generation

    @property
    def _is_placed(self) -> bool:
        return self._standing in {Standing.PLACED, Standing.STOPPING}

    def failed(self, failure: Failure) -> None:
        """Report that the generation has failed here."""
        if self._standing is Standing.PLACED:
            # Ranks may have been killed meanwhile because this launcher stood still.
            self._own = self._cut_off() if self._fence.was_killed() else failure
            self._standing = Standing.STOPPING
            self.report(FAILED, self._own)

    def stopped(self, failure: Failure | None) -> None:
        """Report that no rank runs here any more, and the first failure here."""
        if not self._is_placed:
            return
        own = failure or self._own or self._loss
        if own is not None and self._fence.was_killed():
            own = self._cut_off()
        self._standing, self._own = Standing.WAITING, own
        self._fence.stopped()
        self.report(STOPPED, own)
        if self._loss is not None:
            self._go_on_alone(self._loss)

    def _hear(self, message: Any) -> None:  # noqa: ANN401 - any message
        match message:
            case messages.Acknowledged():
                self._fence.answered(message)
            case messages.Missing():
                self._obey(message.config, message.remarks)
                self._missing = message
                if message.stands_by:
                    self.handler.stand_by()
            case RosterMessage():
                self.roster, self._join, self._own = message, None, None
                self._standing = Standing.PLACED
                self._obey(message.config, message.remarks)
                self.handler.plan(message)
            case messages.Start(generation) if self._is_placed and generation == self._generation:
                self._start()
            case messages.Stop(generation, failure) if generation == self._generation:
                self._stop(failure)
            case Verdict():
                self.judge(message)

    def _obey(self, config: RendezvousConfig, remarks: Sequence[str]) -> None:
        if config != self.config:
            self._fence.config = config
            # It may have to beat more often.
            self._fence.beat()
            if config != self.endpoint.config:
                self.shown(
                    f"{self._coordinator} coordinates the job, and its --nnodes, --spares, "
                    "--max_restart, --grace and timeouts apply, which differ from those here"
                )
            self.handler.obey()
        for remark in remarks:
            self.shown(remark)

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
        if not self._fence.may_run:
            self.stopped(None)
        elif self._standing is Standing.PLACED and self.handler.has_ranks:
            self._standing = Standing.STOPPING
            self.handler.stop(failure)
        elif self._standing is Standing.PLACED:
            self._clock.timer("stop", self._clock.now() + _AGAIN_S, partial(self._stop, failure))

    def judge(self, verdict: Verdict) -> None:
        """End, or gather again."""
        self._standing = Standing.OVER if verdict.is_final else Standing.WAITING
        election, server, failure = self._election, self.server, verdict.failure
        if self._last is not None and failure is not None and not failure.is_departure:
            self._last = self._last._replace(restarts=self._last.restarts + 1)
        if election is not None and server is not None and server.state.verdict is not None:
            election.release(server.state)
        self.handler.conclude(verdict)

    def _end_ranks(self) -> None:
        loss = self._cut_off()
        if self._standing is Standing.PLACED:
            self.report(FAILED, loss)
        self._stop(loss)

    def _lost(self) -> None:
        loss = self._loss_of(self._coordinator, "the coordinator of the job was lost")
        self._lose(self._cut_off() if self.serves else loss)

    def _cut_off(self) -> Failure:
        stood_still = "fleetrun was stopped or without a processor"
        what = f"fleetrun was cut off from the coordinator ({self._coordinator})"
        return self._loss_of(self.host, stood_still if self.serves else what)

    def _loss_of(self, where: str, what: str) -> Failure:
        # A victim, as a rank that loses a peer: a failure of its own on any host is the cause.
        may_change = self.config.may_change
        return Failure(where, what, messages.LOST, is_victim=True, is_departure=may_change)

    def _lose(self, failure: Failure | None = None) -> None:
        if failure is None and self.serves and self._standing is Standing.WAITING:
            # It has only stood still itself.
            return
        self._disconnect()
        failure = failure or self._cut_off()
        is_new = self.roster is None and not (self._missing and self._missing.stands_by)
        if self._is_placed:
            self._loss = failure
            self._stop(failure)
        elif self._standing is not Standing.WAITING:
            pass
        elif self._election is not None and self._join is not None:
            self._hang_up()
            self.handler.look_again()
            self._election.seek()
        elif self._dialer is not None and is_new:
            self.handler.look_again()
            self._dialer.begin()
        else:
            self._go_on_alone(failure)

    def _go_on_alone(self, loss: Failure) -> None:
        self._loss, failure = None, self._own
        is_own = failure is not None and not failure.is_victim
        if failure is None or not is_own:
            failure = loss
        restarts = 0 if self.roster is None else self.roster.restarts
        most, is_departure = self.config.max_restarts, failure.is_departure
        decision = decide(failure.no_retry, restarts, most, is_departure=is_departure)
        is_final = decision.is_final or not self.config.has_store
        launcher, given_up = (self.launcher, loss.what if is_final else "") if is_own else ("", "")
        self.judge(Verdict(self._generation, launcher, failure, is_final, given_up))

    def connected(self) -> tuple[int, ...]:
        """Return the node ranks of the other hosts that the coordinator can reach."""
        hosts = () if self.server is None else self.server.state.hosts.values()
        return tuple(sorted(h.place for h in hosts if h.place is not None and not h.is_local))

    @property
    def has_told_all(self) -> bool:
        """Whether the coordinator is here and has told every host how the job ended."""
        return self.server is not None and len(self.server.state.heard_end) >= self.config.most

    def missing(self) -> str:
        """Return what is awaited."""
        if self.link is not None:
            return "the other hosts" if self._missing is None else self._missing.who or "hosts"
        if self._dialer is None:
            return "a coordinator" if self._election is None else self._election.missing()
        return f"the coordinator ({self._dialer})"

    def shown(self, remark: str) -> None:
        """Print REMARK about the job's hosts, once."""
        if remark not in self._printed and len(self._printed) < _MOST_REMARKS:
            self._printed.add(remark)
            self._log(f"{remark}.")
