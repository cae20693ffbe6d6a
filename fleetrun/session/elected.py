"""A session whose coordinator is elected through etcd; another one follows if it is lost.

The coordinator's name stands in one key with a lease, which it renews; who finds no key puts its
own. Nothing else is stored, as no coordinator promises a member more time than its lease has left:
when that is over, all ranks are dead. How the job ended stays in the key for a while, for hosts
that are cut off meanwhile.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault
from fleetrun.run.events import Failure
from fleetrun.run.loop import Waiting
from fleetrun.session import coordinator
from fleetrun.session.codec import Codec, Malformed
from fleetrun.session.connecting import EVERYWHERE, PortTaken
from fleetrun.session.driver import TRANSPORT, RendezvousEndpoint, Session, Transport
from fleetrun.session.etcd import Client, JobStore, StoreAnswer
from fleetrun.session.messages import JoinRequest, Name, Port, Verdict
from fleetrun.session.wire import Connection, ignore

# Bounds of the timeout of a request to etcd, which is a fifth of the heartbeat timeout, so that
# three members can be asked before the lease ends.
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 0.5, 2.0
# The pause between two looks at the key, or attempts to renew the lease while etcd does not
# answer, and how long the last request may take when the launcher ends.
_AGAIN_S, _LEAVE_S = 0.5, 3.0


class LeaseHolder(NamedTuple):
    """The coordinator of a job, and its endpoint; or how the job with this session has ended."""

    launcher: Name
    host: Name
    port: Port
    session: Name = ""
    verdict: Verdict | None = None


_CODEC = Codec(LeaseHolder)


class ElectedSession(Session):
    """A launcher's part in the session of a job in etcd at MEMBERS.

    `host` of POINT is the name of this host if the user has given one; else the others use the
    address that leads to etcd, or OWN_ADDRESS if that is a loopback address.
    """

    def __init__(
        self,
        point: RendezvousEndpoint,
        launcher: str,
        *,
        host: str,
        log: Callable[[str], None],
        members: Sequence[tuple[str, int]],
        own_address: str = "",
        transport: Transport = TRANSPORT,
        store: Callable[..., JobStore] = JobStore,
    ) -> None:
        super().__init__(point, launcher, host=host, log=log, transport=transport)
        self._own_address = own_address
        self._where = " or ".join(f"{name}:{port}" for name, port in members)
        timeout_s = min(self.config.heartbeat_timeout_s / 5, _MOST_TIMEOUT_S)
        timeout_s = max(timeout_s, _LEAST_TIMEOUT_S)
        self._store = store(Client(members, point.job_id, timeout_s), self._clock)
        # Why etcd does not answer, and whom it names.
        self._trouble = ""
        self._leader: LeaseHolder | None = None
        self._is_seeking = self._is_asking = False
        # When the lease of this launcher ends; None: it does not coordinate. Whether that still
        # matters: a job that never starts again goes on without.
        self._until: float | None = None
        self._lease = 0
        self._is_needed = True
        # Until when the last request may take.
        self._leaves_until = 0.0

    def _timer(self, timer: str, at: float | None, call: Callable[[], None]) -> None:
        self._clock.timer((id(self), timer), at, call)

    # Finding the coordinator --------------------------------------------------------------------

    def open(self, waiting: Waiting) -> None:
        """Find the coordinator, or become it."""
        self._clock.move(waiting)
        self._seek()

    def _seek(self) -> None:
        """Look for a coordinator until there is one."""
        if not self._is_seeking and self._until is None and not self._has_left:
            self._is_seeking, self._leader = True, None
            self._look()

    def _seek_no_more(self) -> None:
        self._is_seeking = False
        self._timer("look", None, self._look)

    def _look(self) -> None:
        if self._is_seeking and not self._is_asking:
            self._is_asking = True
            self._store.ask(self._looked, "look")

    def _look_later(self) -> None:
        self._timer("look", self._clock.now() + _AGAIN_S, self._look)

    def _looked(self, answer: StoreAnswer) -> None:
        self._is_asking, self._trouble = False, answer.trouble
        if not self._is_seeking:
            return
        self._look_later()
        if answer.trouble:
            return
        text, revision, local = answer.value
        session = "" if self.roster is None else self.roster.session
        try:
            leader: LeaseHolder | None = _CODEC.read(text.encode()) if text else None
        except (Malformed, UnicodeError):
            self._trouble = "the value there is not from this version of fleetrun"
            return
        if leader is None or (leader.verdict is not None and not session):
            self._leader = None
            # Nothing runs here, and this host asks for a place.
            if self._join is not None and self._join.failure is None and not self._is_placed:
                self._campaign(revision, local)
        elif leader.verdict is not None:
            self._seek_no_more()
            if leader.session == session:
                self.judge(leader.verdict)
            else:
                self.shown("another job of the same name has begun, and ended")
        elif leader.launcher != self.launcher and leader != self._leader:
            self._leader, self._coordinator = leader, leader.host
            self._call(leader.host, leader.port)

    # Becoming it --------------------------------------------------------------------------------

    def _campaign(self, revision: int, local: str) -> None:
        """Listen, and put this launcher's name into the key; LOCAL: our address towards etcd."""
        is_loopback = local.startswith("127.") and self._own_address
        host = self._endpoint.host or (self._own_address if is_loopback else local)
        is_address = host.replace(".", "").isdecimal()
        try:
            self._listen(self._endpoint.addresses or (host if is_address else EVERYWHERE,))
        except EnvironmentFault as error:
            if self.roster is None and not isinstance(error, PortTaken):
                raise
            # Another host can coordinate, or another launcher of this one.
            self.shown(str(error).rstrip("."))
            return
        leader = LeaseHolder(self.launcher, host, self._endpoint.port)
        value, ttl_s = _CODEC.write(leader).decode(), math.ceil(self.config.heartbeat_timeout_s)
        self._is_asking = True
        done = partial(self._campaigned, leader)
        self._store.ask(done, "campaign", value, max(1, ttl_s), revision)

    def _campaigned(self, leader: LeaseHolder, answer: StoreAnswer) -> None:
        self._is_asking, self._trouble = False, answer.trouble
        until = answer.asked_at + self.config.heartbeat_timeout_s - self.config.margin_s
        if answer.value is None or not self._is_seeking or self._clock.now() >= until:
            if answer.value is not None:
                self._store.ask(ignore, "revoke", answer.value)
            self._unlisten()
            self._look_later()
            return
        self._seek_no_more()
        self._leader, self._lease, self._is_needed = leader, answer.value, True
        self._renewed(answer.asked_at)
        if self._last is not None:
            self._log("This host coordinates the job from now on.")
        self._serve(leader.host)

    def _unlisten(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # Being it -----------------------------------------------------------------------------------

    def _promise_s(self) -> float:
        if self._until is None:
            return 0.0
        return self._until - self._clock.now() if self._is_needed else math.inf

    def _renewed(self, asked_at: float) -> None:
        """Note that the lease lasts from ASKED_AT on."""
        self._until = asked_at + self.config.heartbeat_timeout_s
        self._timer("end", self._until - self.config.margin_s, self._expire)
        self._timer("renew", asked_at + self.config.heartbeat_s, self._renew)

    def _renew(self) -> None:
        # By the loop that coordinates: one that stands still must not keep its lease.
        self._store.ask(self._renewal, "renew", self._lease)

    def _renewal(self, answer: StoreAnswer) -> None:
        if self._until is None:
            return
        self._trouble = answer.trouble
        if answer.value:
            self._renewed(answer.asked_at)
        elif answer.trouble or not self._is_needed:
            self._timer("renew", self._clock.now() + _AGAIN_S, self._renew)
        else:
            self._resign("etcd no longer accepts this coordinator")

    def _expire(self) -> None:
        if self._is_needed:
            why = f" ({self._trouble})" if self._trouble else ""
            self._resign(f"etcd has not answered for {self.config.fence_s:.0f} s{why}")

    def _stepped(self) -> None:
        server, config = self._server, self.config
        if server is None:
            return
        state = server.state
        if state.phase == coordinator.ENDED and self._has_left:
            self._free_key(state.session, state.verdict if state.has_begun else None)
        elif state.phase == coordinator.RUNNING:
            # Nobody can take over a job that never starts again.
            self._is_needed = config.may_change or config.max_restarts > 0

    def _resign(self, why: str) -> None:
        """Stop coordinating: another launcher may, when the lease is over."""
        self._drop_lease()
        self.shown(f"This host no longer coordinates the job: {why}")
        self._serve_no_more()
        self._lose(self._cut_off())

    def _drop_lease(self) -> None:
        self._until = self._leader = None
        for timer in ("end", "renew"):
            self._timer(timer, None, self._look)

    def _serve_no_more(self) -> None:
        server, self._server = self._server, None
        self._unlisten()
        self._hang_up()
        if server is not None:
            server.finish()

    def _free_key(self, session: str, verdict: Verdict | None) -> None:
        """Leave the key to another coordinator, or with a VERDICT, to hosts that were cut off."""
        if self._until is None:
            return
        self._drop_lease()
        self._leaves_until = self._clock.now() + _LEAVE_S
        if verdict is None:
            self._store.ask(ignore, "revoke", self._lease)
        else:
            value = _CODEC.write(LeaseHolder(self.launcher, "", 1, session, verdict)).decode()
            remembered_s = math.ceil(self.config.rdzv_timeout_s + self.config.heartbeat_timeout_s)
            self._store.ask(ignore, "bury", self._lease, value, remembered_s)
        # Wake the loop when that is over.
        self._timer("left", self._leaves_until, self._seek_no_more)

    # Overrides of Session -----------------------------------------------------------------------

    def join(self, request: JoinRequest, failure: Failure | None = None) -> None:
        """Ask for a place in the next generation, or report in FAILURE why this host cannot."""
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
            if is_idle:
                self._free_key("", None)
            else:
                # Ranks may still run until the lease is over.
                self._drop_lease()
            return
        super().quit(failure)
        self._stepped()

    def _answered(self, connection: Connection) -> None:
        self._seek_no_more()
        super()._answered(connection)

    def _may_seek(self) -> bool:
        return self._join is not None

    @property
    def is_busy(self) -> bool:
        """Whether messages are under way, or the end is being stored."""
        is_storing = self._store.is_busy and self._clock.now() < self._leaves_until
        return super().is_busy or (not self._is_closed and is_storing)

    def close(self) -> None:
        """End all connections."""
        self._seek_no_more()
        self._drop_lease()
        self._timer("left", None, self._seek_no_more)
        self._store.close()
        super().close()

    def missing(self) -> str:
        """Return what is awaited."""
        if self.is_connected or self._leader is not None:
            return super().missing()
        if self._trouble:
            return f"etcd ({self._trouble})"
        return f"a coordinator that etcd at {self._where} knows"
