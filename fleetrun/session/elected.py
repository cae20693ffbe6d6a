"""A session whose coordinator is elected through etcd; another one follows if it is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetrun.run.events import Failure
from fleetrun.run.loop import Waiting
from fleetrun.run.tcpconnect import literal
from fleetrun.session import coordinator
from fleetrun.session.callers import Server
from fleetrun.session.connection import Connection
from fleetrun.session.dialer import Target
from fleetrun.session.driver import (
    TRANSPORT,
    RendezvousEndpoint,
    Session,
    Transport,
)
from fleetrun.session.etcd import JobStore, StoreAddress
from fleetrun.session.lease import Election, LeaseHolder
from fleetrun.session.listener import EVERYWHERE
from fleetrun.session.messages import JoinRequest, RosterMessage, Verdict
from fleetrun.text import counted

# Bounds of the timeout of a request to etcd, which is a fifth of the heartbeat timeout, so that
# three members can be asked before the lease ends.
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 0.5, 2.0
_LOOPBACK = ("127.", "::1")


class ElectedSession(Session):
    """A launcher's part in the session of a job in etcd at ENDPOINTS, over TLS if IS_SECURE.

    `host` of ENDPOINT is the name of this host if the user has given one; else the others use the
    address that leads to etcd, or one of OWN_ADDRESSES if that is a loopback address.
    """

    def __init__(
        self,
        endpoint: RendezvousEndpoint,
        launcher: str,
        *,
        host: str,
        log: Callable[[str], None],
        endpoints: Sequence[tuple[str, int]],
        is_secure: bool = False,
        own_addresses: Sequence[str] = (),
        transport: Transport = TRANSPORT,
        store: Callable[..., JobStore] = JobStore,
    ) -> None:
        super().__init__(endpoint, launcher, host=host, log=log, transport=transport)
        self._own_addresses = own_addresses
        self._where = " or ".join(str(Target(*server)) for server in endpoints)
        timeout_s = min(self.config.heartbeat_timeout_s / 5, _MOST_TIMEOUT_S)
        timeout_s = max(timeout_s, _LEAST_TIMEOUT_S)
        address = StoreAddress(tuple(endpoints), endpoint.job_id, timeout_s, is_secure)
        asked = store(address, self._share)
        self._election = Election(self.config, launcher, asked, self._share, self)

    may_follow = True
    # The coordinator that was here, whose last messages are still sent.
    _former: Server | None = None

    @property
    def may_hand_over(self) -> bool:
        """Whether another launcher can coordinate the job when this one leaves."""
        return self.config.may_change

    def open(self, waiting: Waiting) -> None:
        """Find the coordinator, or become it."""
        self._share.move(waiting)
        self._election.seek()

    @property
    def is_busy(self) -> bool:
        """Whether messages are under way, or the end is being stored."""
        return super().is_busy or (not self._is_closed and self._election.is_busy)

    def close(self) -> None:
        """End all connections."""
        self._election.close()
        if self._former is not None:
            self._former.close()
        super().close()

    def missing(self) -> str:
        """Return what is awaited."""
        if self.is_connected or self._election.leader is not None:
            return super().missing()
        trouble = self._election.trouble
        if trouble:
            return f"etcd ({trouble})"
        etcd = f"etcd at {self._where}"
        return f"a coordinator that {etcd} knows" if self._election.has_answered else etcd

    def join(self, request: JoinRequest, failure: Failure | None = None) -> None:
        """Join the next generation, or report in FAILURE why this host cannot."""
        super().join(request, failure)
        if not self.is_connected:
            self._seek()

    def quit(self, failure: Failure | None) -> None:
        """Leave; a coordinator that departs leaves the job to the others."""
        server = self._server
        is_departure = failure is not None and failure.is_departure and not self._is_over
        if server is not None and is_departure and server.state.phase == coordinator.FORMING:
            self._has_left = True
            is_idle = server.is_idle
            self._serve_no_more()
            self._election.leave(may_free=is_idle)
            return
        super().quit(failure)
        self._stepped()

    def prepare(self, roster: RosterMessage) -> None:
        """Plan this host's part."""
        self._election.session = roster.session
        super().prepare(roster)

    # As a candidate of the election -------------------------------------------------------------

    def may_lead(self) -> bool:
        """Whether nothing runs here, and this host asks for a place."""
        has_asked = self._request is not None and self._request[1] is None
        return has_asked and not self._is_placed and not self._has_left

    def listen(self, local: str) -> tuple[str, int]:
        """Listen for the other hosts; LOCAL is our address in the network of etcd."""
        endpoint = self._endpoint
        host = endpoint.host or local
        if not endpoint.host and local.startswith(_LOOPBACK) and self._own_addresses:
            host = self._own_addresses[0]
        everywhere = (host,) if literal(host, 1) else (EVERYWHERE,)
        self._listen(endpoint.addresses or everywhere)
        assert self._listener is not None  # else it has raised PortTaken
        return host, self._listener.port

    def unlisten(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def lead(self, host: str) -> None:
        """Coordinate from now on."""
        if self._member.last is not None:
            self._log("This host coordinates the job from now on.")
        self._serve(host)

    def follow(self, leader: LeaseHolder) -> None:
        """Call the coordinator."""
        self._member.coordinator = leader.host
        self._call([Target(leader.host, leader.port)])

    def resign(self, why: str) -> None:
        """Stop coordinating: another launcher may, when the lease is over."""
        self.shown(f"This host no longer coordinates the job: {why}")
        self._serve_no_more()
        self.lose(self._member.loss())

    def bury(self, verdict: Verdict) -> None:
        """End as the job has ended while this host was cut off."""
        self.judge(verdict)

    def note(self, text: str) -> None:
        """Print TEXT, once."""
        self.shown(text.rstrip("."))

    def _serve_no_more(self) -> None:
        server, self._server = self._server, None
        self.unlisten()
        self._hang_up()
        if server is not None:
            server.finish()
            self._former = server

    # Overrides of Session -----------------------------------------------------------------------

    def _promise_s(self) -> float:
        return self._election.promise_s()

    def _stepped(self) -> None:
        server = self._server
        if server is None:
            return
        state = server.state
        if state.phase == coordinator.ENDED and self._has_left:
            verdict = state.verdict if state.has_begun else None
            self._election.leave(state.session, verdict, may_free=True)
        elif state.phase == coordinator.RUNNING:
            self._election.began()
        elif state.phase == coordinator.FORMING and state.generation and server.is_idle:
            present, least = len(state.hosts), state.config.least
            # The others need a moment to find this coordinator.
            patient_until = max(state.since, state.not_before) + self.config.heartbeat_timeout_s / 2
            if present < least and self._share.now() >= patient_until:
                reached = counted(present, "host")
                self._election.give_way(f"it reaches {reached}, and the job needs {least}")

    def _obey(self) -> None:
        self._election.config = self.config
        super()._obey()

    def _answered(self, connection: Connection) -> None:
        self._election.stop_seeking()
        super()._answered(connection)

    def _seek(self) -> None:
        if not self._has_left:
            self._election.seek()

    def _without_coordinator(self, failure: Failure) -> None:
        if self._request is not None:
            self._seek()
        else:
            self._go_on_alone(failure)
