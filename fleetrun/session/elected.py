"""A session whose coordinator is elected through etcd, and replaced when its host is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fleetrun.run.events import Failure
from fleetrun.run.loop import Waiting
from fleetrun.run.tcpconnect import literal
from fleetrun.session import member, messages, state
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.connection import Connection
from fleetrun.session.dialer import Target
from fleetrun.session.driver import TRANSPORT, RendezvousEndpoint, Session, Transport
from fleetrun.session.election import Election
from fleetrun.session.jobrecord import JobRecord, LeaderRecord, StoreAddress
from fleetrun.session.jobstore import JobStore
from fleetrun.session.listener import EVERYWHERE
from fleetrun.session.loss import LossReport, PlaceRelease
from fleetrun.session.messages import FromCoordinator, Missing, RosterMessage
from fleetrun.text import counted

# Bounds of the timeout of a request to etcd, which is a fifth of the heartbeat timeout, so that
# three members can be asked before the lease ends.
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 0.5, 2.0
_LOOPBACK = ("127.", "::1")
# The prefix of a target that is this coordinator's own key in etcd.
_PLACE = "place "


class ElectedSession(Session):
    """A launcher's part in the session of a job in etcd at ENDPOINTS, over TLS if IS_SECURE.

    `host` of ENDPOINT is the name of this host if the user has given one; else the others use the
    address that leads to etcd, or one of OWN if that is a loopback address.
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
        self._own = own_addresses
        timeout_s = min(self.config.heartbeat_timeout_s / 5, _MOST_TIMEOUT_S)
        self._where = " or ".join(str(Target(*server)) for server in endpoints)
        timeout_s = max(timeout_s, _LEAST_TIMEOUT_S)
        address = StoreAddress(tuple(endpoints), endpoint.job_id, timeout_s, is_secure)
        self._store = store(address, self._share)
        self._election = Election(
            self.config, launcher, self._store, self._share, self, clock=transport.clock
        )
        self._called: LeaderRecord | None = None
        # The roster that etcd is storing, and the messages that wait for that.
        self._unkept: RosterMessage | None = None
        self._held: deque[tuple[int, FromCoordinator]] = deque()

    @property
    def may_hand_over(self) -> bool:
        """Whether another launcher can coordinate the job when this one leaves."""
        return self.config.may_change

    def open(self, waiting: Waiting) -> None:
        """Find the coordinator, or become it."""
        self._share.move(waiting)
        now = self._clock()
        self._member = member.begin(self.config, self.launcher, "", now, is_local=False)
        self._election.seek()

    @property
    def is_busy(self) -> bool:
        """Whether messages are under way, or the end is being stored."""
        return super().is_busy or (not self._is_closed and self._election.is_busy)

    def close(self) -> None:
        """End all connections."""
        super().close()
        self._election.close()

    def missing(self) -> str:
        """Return what is awaited."""
        if self.is_connected or self._election.leader is not None:
            return super().missing()
        trouble = self._election.trouble
        if trouble:
            return f"etcd ({trouble})"
        etcd = f"etcd at {self._where}"
        return f"a coordinator that {etcd} knows" if self._election.has_answered else etcd

    def _quit(self, failure: Failure | None) -> None:
        coordinator, election = self._coordinator, self._election
        is_departure = failure is not None and failure.is_departure
        has_stopped = coordinator is not None and coordinator.phase == state.FORMING
        if is_departure and has_stopped and self.may_hand_over and self._member is not None:
            # Nothing runs anywhere; one of the others becomes the coordinator.
            self._member = self._member._replace(phase=member.ENDED)
            self._serve_no_more(is_polite=True)
            election.leave(is_final=False)
            return
        super()._quit(failure)
        election.leave(is_final=True)

    # As a candidate of the election -------------------------------------------------------------

    def may_lead(self) -> bool:
        """Whether nothing runs here and this host has asked to join."""
        known = self._member
        if known is None or known.request is None or known.failure is not None:
            return False
        return known.phase == member.JOINING

    def listen(self, local: str) -> tuple[str, int]:
        """Listen for the other hosts; LOCAL is our address in the network of etcd."""
        endpoint = self._endpoint
        host = endpoint.host or local
        if not endpoint.host and local.startswith(_LOOPBACK) and self._own:
            host = self._own[0]
        everywhere = (host,) if literal(host, 1) else (EVERYWHERE,)
        self._listener = self._listen(endpoint.addresses or everywhere)
        assert self._listener is not None  # else it has raised PortTaken
        return host, self._listener.port

    def unlisten(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def lead(self, job: JobRecord | None, lost_at: float) -> None:
        """Coordinate JOB, or a new one."""
        leader, now = self._election.leader, self._clock()
        if leader is None or self._listener is None or self._member is None or self._is_closed:
            return
        self._hang_up()
        has_token = self.key.has_token
        begun = (
            state.begin(self.config, now, leader.job, has_token=has_token)
            if job is None
            else state.resume(now, job, self.launcher, lost_at, has_token=has_token)
        )
        generation = max(begun.generation, self._member.generation)
        self._coordinator = begun._replace(generation=generation)
        self._own_host = leader.host
        # If this launcher is killed, its guard frees the place.
        revision, lease = self._election.place
        self._tell_at(Target(f"{_PLACE}{revision}", lease))
        config = begun.config
        self._member = self._member._replace(
            config=config, is_local=True, coordinator=leader.host, generation=generation
        )
        self._listener.open()
        if job is not None:
            self._log("This host coordinates the job from now on.")
        self._event(member.Connected(now))

    def follow(self) -> None:
        """Call the leader, whom the election knows, once no ranks run here."""
        self._hang_up()
        self._called = None
        if self._member is not None:
            self._event(member.Gone(self._clock()))

    def unfollow(self) -> None:
        """Forget the leader, which is gone."""
        self._set_timers()

    def loss_report(self, waiting: Waiting, target: tuple[str, int]) -> LossReport | PlaceRelease:
        """Return the report that this launcher was killed, or what frees its place in etcd."""
        place, lease = target
        if not place.startswith(_PLACE):
            return super().loss_report(waiting, target)
        return PlaceRelease(self._store.elsewhere(waiting), int(place[len(_PLACE) :]), lease)

    def resign(self, why: str, renewed_at: float) -> None:
        """Stop coordinating; the ranks here end in time."""
        self._log(f"This host no longer coordinates the job: {why}.")
        self._serve_no_more()
        if self._member is not None:
            self._member = self._member._replace(is_local=False, alive_at=renewed_at)
            self._event(member.Gone(self._clock()))

    def _serve_no_more(self, *, is_polite: bool = False) -> None:
        """Close all callers; IS_POLITE: once everything is sent."""
        self._coordinator = None
        self._share.timer((id(self), "coordinator"), None, self._coordinator_elapsed)
        self.unlisten()
        self._held.clear()
        self._unkept = None
        if is_polite:
            self._callers.finish_all()
        else:
            self._callers.close()

    def renewed(self, at: float) -> None:
        """Postpone the killing of the ranks, as nobody else coordinates yet."""
        if self.config.starts_again:
            self._kill_at = at + self.config.guard_s
            if self._guard is not None:
                self._guard.kill_at(self._kill_at)

    def end(self, why: str) -> None:
        """End this launcher, as there is no leader to follow."""
        self._event(member.Gone(self._clock(), why))

    def note(self, text: str) -> None:
        """Print TEXT, once."""
        self.shown(text.rstrip("."))

    # Overrides of Session -------------------------------------------------------------------------

    def _event(self, event: member.Event) -> None:
        self._election.check()
        super()._event(event)

    def _feed_coordinator(self, event: state.Event) -> None:
        self._election.check()
        super()._feed_coordinator(event)
        known = self._coordinator
        if known is not None and state.is_below_minimum(known):
            present, least = len(known.here), known.config.least
            reached = counted(present, "host")
            self._election.give_way(f"it reaches {reached}, and the job needs {least}")

    def _send(self, number: int, message: FromCoordinator) -> None:
        """Send MESSAGE; hold a roster and what follows it until etcd has stored it."""
        if isinstance(message, messages.RosterMessage):
            self._keep(message)
        held = {held_number for held_number, _ in self._held}
        is_held = self._unkept is not None and (
            isinstance(message, messages.RosterMessage) or number in held
        )
        if is_held and not isinstance(message, messages.Acknowledged):
            self._held.append((number, message))
        else:
            super()._send(number, message)

    _kept_generation = -1

    def _keep(self, roster: RosterMessage) -> None:
        if self._unkept is not None or roster.generation == self._kept_generation:
            return
        if self._coordinator is None:
            return
        self._unkept = roster
        record = state.record(self._coordinator, roster, self.launcher)
        self._election.keep(record, self._has_kept)

    def _has_kept(self) -> None:
        if self._unkept is None:
            return
        self._kept_generation = self._unkept.generation
        self._unkept = None
        if not self.config.starts_again:
            self._election.fix()
        held, self._held = self._held, deque()

        def send() -> None:
            for number, message in held:
                self._send(number, message)

        self._do(send)

    def _obey(self, requested: RendezvousConfig, config: RendezvousConfig) -> None:
        self._election.config = config
        super()._obey(requested, config)

    def _plan(self, roster: RosterMessage) -> None:
        self._election.take_part()
        super()._plan(roster)

    def _show(self, missing: Missing) -> None:
        if missing.stands_by:
            self._election.take_part()
        super()._show(missing)

    def _answered(self, connection: Connection) -> None:
        self._election.connected()
        super()._answered(connection)

    def _set_timers(self) -> None:
        super()._set_timers()
        known = self._member
        if self._is_closed or known is None or known.phase == member.ENDED or self.is_connected:
            return
        self._election.seek()
        leader = self._election.leader
        if leader == self._called or known.phase not in {member.IDLE, member.JOINING}:
            # While ranks run, the last leader's verdict may still arrive.
            return
        self._called = leader
        if leader is None:
            self._hang_up()
        else:
            generation = max(known.generation, leader.generation)
            self._member = known._replace(coordinator=leader.host, generation=generation)
            self._call([Target(leader.host, leader.port)])
