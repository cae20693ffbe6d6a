"""The election of a job's coordinator through etcd; another one follows if it is lost.

The coordinator's name stands in one key with a lease, which it renews; who finds no key puts its
own. Nothing else is stored, as no coordinator promises a member more time than its lease has left:
when that is over, all ranks are dead. How the job ended stays in the key for a while, for hosts
that are cut off meanwhile, which would begin it again.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault
from fleetrun.plan.hosts import is_loopback
from fleetrun.run.loop import nothing
from fleetrun.session.codec import Codec, Malformed
from fleetrun.session.connecting import Listener
from fleetrun.session.coordinator import FORMING, PREPARING, State
from fleetrun.session.driver import Session
from fleetrun.session.etcd import JobKey, KeyAnswer
from fleetrun.session.messages import Name, Port, Verdict
from fleetrun.session.serving import SessionClock
from fleetrun.session.wire import ignore

# Bounds of the timeout of a request to etcd, which is a fifth of the heartbeat timeout, so that
# three members can be asked before the lease ends.
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 0.5, 2.0
# The pause between two looks at the key, or attempts to renew the lease while etcd does not answer.
_AGAIN_S = 0.5


class LeaseHolder(NamedTuple):
    """The launcher that coordinates a job, and its endpoint; or the session that has ended."""

    name: Name
    host: Name
    port: Port
    verdict: Verdict | None = None


_CODEC = Codec(LeaseHolder)


class Election:
    """Says who coordinates: SESSION's launcher until `until`, another one to call, or nobody.

    The others call it at the host of the session's endpoint, if there is one; else at its address
    towards etcd, which is at MEMBERS, or at OWN_ADDRESS where that is a loopback address.
    """

    def __init__(
        self,
        session: Session,
        clock: SessionClock,
        *,
        members: Sequence[tuple[str, int]],
        own_address: str = "",
        make_key: Callable[..., JobKey] = JobKey,
    ) -> None:
        self._session, self._clock, self._own_address = session, clock, own_address
        where = " or ".join(f"{name}:{port}" for name, port in members)
        # Whom a launcher without a coordinator waits for, and why etcd does not answer.
        self._awaited, self._trouble = f"a coordinator that etcd at {where} knows", ""
        timeout_s = max(_LEAST_TIMEOUT_S, min(session.config.heartbeat_s, _MOST_TIMEOUT_S))
        self._key = make_key(members, session.endpoint.job_id, timeout_s, clock)
        self.is_busy, self.close = self._key.is_busy, self._key.close
        # When the lease of this launcher ends; None: it does not coordinate.
        self.until: float | None = None
        self.lease = self._revision = 0
        self._leader: LeaseHolder | None = None
        self._is_seeking = False

    def _timer(self, timer: str, at: float | None, call: Callable[[], None] = nothing) -> None:
        self._clock.timer((id(self), timer), at, call)

    def seek(self) -> None:
        """Look for a coordinator until there is one."""
        if not self._is_seeking and self.until is None:
            self._is_seeking, self._leader = True, None
            self._key.ask(self._looked, "look")

    def settle(self) -> None:
        """Seek no more: there is a coordinator, or none is needed."""
        self._is_seeking = False
        self._timer("look", None)

    def _answered(self, answer: KeyAnswer) -> bool:
        # Whether a coordinator is still sought.
        self._trouble = answer.trouble
        if self._is_seeking:
            look = partial(self._key.ask, self._looked, "look")
            self._timer("look", self._clock.now() + _AGAIN_S, look)
        return self._is_seeking

    def _looked(self, answer: KeyAnswer) -> None:
        if not self._answered(answer) or answer.trouble:
            return
        text, revision, local = answer.value
        session, roster = self._session, self._session.roster
        try:
            leader = _CODEC.read(text.encode()) if text else None
        except (Malformed, UnicodeError):
            self._trouble = "the value there is not from this version of fleetrun"
            return
        if leader is None or (leader.verdict is not None and roster is None):
            self._leader = None
            if session.may_coordinate:
                self._campaign(revision, local)
        elif leader.verdict is not None:
            self.settle()
            if roster is not None and leader.name == roster.session:
                session.judge(leader.verdict)
        elif leader.name != session.launcher and leader != self._leader:
            self._leader = leader
            session.call(leader.host, leader.port)

    def _campaign(self, revision: int, local: str) -> None:
        session = self._session
        # Debian's hosts know their own names by such an address.
        is_near = is_loopback(local) and self._own_address
        host = session.endpoint.host or (self._own_address if is_near else local)
        try:
            listener = session.listen(session.endpoint.address or host)
        except EnvironmentFault as error:
            # Another host can coordinate, or another launcher of this one.
            session.shown(str(error).rstrip("."))
            return
        leader = LeaseHolder(session.launcher, host, session.endpoint.port)
        value, ttl_s = _CODEC.write(leader).decode(), math.ceil(session.config.heartbeat_timeout_s)
        self._timer("look", None)
        self._key.ask(partial(self._campaigned, host, listener), "campaign", value, ttl_s, revision)

    def _campaigned(self, host: str, listener: Listener, answer: KeyAnswer) -> None:
        if self._answered(answer) and answer.value is not None:
            self.settle()
            self.lease, self._revision = answer.value
            self._renewed(answer.asked_at)
            self._session.serve(host, listener)
            return
        listener.close()
        if answer.value is not None:
            self._key.ask(ignore, "revoke", answer.value[0])

    def left_s(self) -> float:
        """Return for how long nobody replaces this coordinator."""
        if self.until is None or not self.is_needed:
            return math.inf
        return self.until - self._clock.now()

    @property
    def is_needed(self) -> bool:
        """Whether another one could follow: a job that never starts again goes on without etcd."""
        server, config = self._session.server, self._session.config
        has_begun = server is not None and server.state.phase not in {FORMING, PREPARING}
        return not has_begun or config.may_change or config.max_restarts > 0

    def _renewed(self, asked_at: float) -> None:
        config = self._session.config
        self.until = asked_at + config.heartbeat_timeout_s
        # Ranks are asked to end half a margin later, and those of each restart would be, too.
        silent_s = config.fence_s - config.margin_s
        self._timer("end", asked_at + silent_s, partial(self._expire, silent_s))
        # By the loop that coordinates: one that stands still must not keep its lease.
        self._timer("renew", asked_at + config.heartbeat_s, self._renew)

    def _renew(self) -> None:
        self._key.ask(self._renewal, "renew", self.lease)

    def _renewal(self, answer: KeyAnswer) -> None:
        self._trouble = answer.trouble
        if self.until is None:
            return
        if answer.value:
            self._renewed(answer.asked_at)
        elif answer.trouble:
            self._timer("renew", self._clock.now() + _AGAIN_S, self._renew)
        else:
            self._resign("etcd no longer accepts this coordinator")

    def _expire(self, silent_s: float) -> None:
        why = f" ({self._trouble})" if self._trouble else ""
        self._resign(f"etcd has not answered for {silent_s:.0f} s{why}")

    def _resign(self, why: str) -> None:
        if self.is_needed:
            self._drop()
            self._session.resign(why)

    def _drop(self) -> None:
        self.until = None
        for timer in ("end", "renew"):
            self._timer(timer, None)

    def release(self, state: State) -> None:
        """Leave the key to another coordinator, or to hosts that are cut off as the job ends."""
        if self.until is None:
            return
        self._drop()
        if state.verdict is None or not state.has_begun:
            self._key.ask(ignore, "revoke", self.lease)
            return
        value = _CODEC.write(LeaseHolder(state.session, "", 1, state.verdict)).decode()
        remembered_s = math.ceil(state.config.rdzv_timeout_s + state.config.heartbeat_timeout_s)
        self._key.ask(ignore, "campaign", value, remembered_s, self._revision)

    def missing(self) -> str:
        """Return who is awaited while no coordinator is known."""
        return f"etcd ({self._trouble})" if self._trouble else self._awaited
