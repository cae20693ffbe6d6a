"""Which launcher coordinates a job that meets in etcd: the one whose name stands in one key.

The key has a lease, which its holder renews; who finds no key puts its own. Nothing else is stored,
as no coordinator promises a member more time than its lease has left: when that is over, all ranks
are dead. How the job ended stays in the key for a while, for hosts that are cut off meanwhile.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from fleetrun.errors import EnvironmentFault
from fleetrun.session.callers import SessionClock
from fleetrun.session.codec import Codec, Malformed
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.etcd import JobStore, StoreAnswer
from fleetrun.session.messages import Name, Port, Verdict

# The pause between two looks at the key, between two attempts to renew the lease while etcd does
# not answer, and how long the last request may take when the launcher ends.
_LOOK_S, _AGAIN_S, _LEAVE_S = 0.5, 0.5, 3.0


class LeaseHolder(NamedTuple):
    """The coordinator of a job, and its endpoint; or how the job with this session has ended."""

    launcher: Name
    host: Name
    port: Port
    session: Name = ""
    verdict: Verdict | None = None


_CODEC = Codec(LeaseHolder)


class LeaseCandidate(Protocol):
    """A launcher that may become the coordinator."""

    def may_lead(self) -> bool:
        """Whether nothing runs here, and this host asks for a place."""

    def listen(self, local: str) -> tuple[str, int]:
        """Listen, and return where; LOCAL is our address in the network of etcd."""

    def unlisten(self) -> None:
        """Listen no more."""

    def lead(self, host: str) -> None:
        """Coordinate from now on; the others reach this host as HOST."""

    def follow(self, leader: LeaseHolder) -> None:
        """Call the coordinator."""

    def resign(self, why: str) -> None:
        """Coordinate no more."""

    def bury(self, verdict: Verdict) -> None:
        """Take note that the job has ended while this host was cut off."""

    def note(self, text: str) -> None:
        """Print TEXT, once."""


class Election:
    """The part of LAUNCHER in the election of the coordinator of a job with CONFIG."""

    def __init__(
        self,
        config: RendezvousConfig,
        launcher: str,
        store: JobStore,
        clock: SessionClock,
        candidate: LeaseCandidate,
    ) -> None:
        self.config = config
        # The session in which this launcher has had a place.
        self.session = ""
        # Whether etcd has answered, and why it does not.
        self.has_answered, self.trouble = False, ""
        self.leader: LeaseHolder | None = None
        # When the lease of this launcher ends; None: it does not coordinate.
        self.until: float | None = None
        self._launcher, self._store, self._clock = launcher, store, clock
        self._candidate = candidate
        self._lease = 0
        self._is_seeking = self._is_asking = False
        # It does not campaign before then.
        self._rests_until = 0.0
        # Whether the lease still matters: a job that never starts again ends with its coordinator.
        self._is_needed = True
        self._leaves_until = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether the last request is under way, for a short time."""
        return self._store.is_busy and self._clock.now() < self._leaves_until

    def promise_s(self) -> float:
        """Return for how long nobody else coordinates."""
        if self.until is None:
            return 0.0
        return self.until - self._clock.now() if self._is_needed else math.inf

    # Finding the coordinator --------------------------------------------------------------------

    def seek(self) -> None:
        """Look for a coordinator until there is one."""
        if not self._is_seeking and self.until is None:
            self._is_seeking, self.leader = True, None
            self._look()

    def stop_seeking(self) -> None:
        """Look no more: the coordinator is connected."""
        self._is_seeking = False
        self._timer("look", None, self._look)

    def _look(self) -> None:
        if self._is_seeking and not self._is_asking:
            self._is_asking = True
            self._store.ask(self._looked, "look")

    def _look_later(self) -> None:
        self._timer("look", self._clock.now() + _LOOK_S, self._look)

    def _looked(self, answer: StoreAnswer) -> None:
        self._is_asking, self.trouble = False, answer.trouble
        if not self._is_seeking:
            return
        self._look_later()
        if answer.trouble:
            return
        self.has_answered = True
        text, revision, local = answer.value
        leader = self._read(text)
        if text and leader is None:
            self.trouble = "the value there is not from fleetrun"
        elif leader is None or (leader.verdict is not None and not self.session):
            self.leader = None
            if self._candidate.may_lead() and self._clock.now() >= self._rests_until:
                self._campaign(revision, local)
        elif leader.verdict is not None:
            self.stop_seeking()
            what = "another job of the same name has begun, and ended"
            if leader.session == self.session:
                self._candidate.bury(leader.verdict)
            else:
                self._candidate.note(what)
        elif leader.launcher != self._launcher and leader != self.leader:
            self.leader = leader
            self._candidate.follow(leader)

    @staticmethod
    def _read(text: str) -> LeaseHolder | None:
        try:
            leader = _CODEC.read(text.encode(errors="replace"))
        except Malformed:
            return None
        return leader if isinstance(leader, LeaseHolder) else None

    # Becoming it --------------------------------------------------------------------------------

    def _campaign(self, revision: int, local: str) -> None:
        try:
            host, port = self._candidate.listen(local)
        except EnvironmentFault as error:
            if not self.session:
                raise
            # Another host can coordinate.
            self._candidate.note(str(error))
            return
        leader = LeaseHolder(self._launcher, host, port)
        value = _CODEC.write(leader).decode()
        self._is_asking = True
        done = partial(self._campaigned, leader)
        self._store.ask(done, "campaign", value, self._ttl_s, revision)

    @property
    def _ttl_s(self) -> int:
        return max(1, math.ceil(self.config.heartbeat_timeout_s))

    def _campaigned(self, leader: LeaseHolder, answer: StoreAnswer) -> None:
        self._is_asking, self.trouble = False, answer.trouble
        until = answer.asked_at + self.config.heartbeat_timeout_s - self.config.margin_s
        if answer.value is None or not self._is_seeking or self._clock.now() >= until:
            if answer.value is not None:
                self._store.ask(_ignore, "revoke", answer.value)
            self._candidate.unlisten()
            self._look_later()
            return
        self.stop_seeking()
        self.leader, self._lease, self._is_needed = leader, answer.value, True
        self._renewed(answer.asked_at)
        self._candidate.lead(leader.host)

    # Being it -----------------------------------------------------------------------------------

    def _renewed(self, asked_at: float) -> None:
        """Note that the lease lasts from ASKED_AT on."""
        self.until = asked_at + self.config.heartbeat_timeout_s
        self._timer("end", self.until - self.config.margin_s, self._expire)
        self._timer("renew", asked_at + self.config.heartbeat_s, self._renew)

    def _renew(self) -> None:
        # By the loop that coordinates: one that stands still must not keep its lease.
        self._store.ask(self._renewal, "renew", self._lease)

    def _renewal(self, answer: StoreAnswer) -> None:
        if self.until is None:
            return
        self.trouble = answer.trouble
        if answer.trouble or (not answer.value and not self._is_needed):
            self._timer("renew", self._clock.now() + _AGAIN_S, self._renew)
        elif answer.value:
            self._renewed(answer.asked_at)
        else:
            self._resign("etcd no longer accepts this coordinator")

    def _expire(self) -> None:
        if self._is_needed:
            why = f" ({self.trouble})" if self.trouble else ""
            silence_s = self.config.fence_s
            self._resign(f"etcd has not answered for {silence_s:.0f} s{why}")

    def began(self) -> None:
        """Go on without the lease, as nobody can take over a job that never starts again."""
        config = self.config
        self._is_needed = config.may_change or config.max_restarts > 0

    def give_way(self, why: str) -> None:
        """Let a launcher coordinate that may reach more hosts; no rank runs anywhere."""
        self._rests_until = self._clock.now() + self.config.heartbeat_timeout_s
        self._store.ask(_ignore, "revoke", self._lease)
        self._resign(why)

    def _resign(self, why: str) -> None:
        self._drop()
        self._candidate.resign(why)

    def _drop(self) -> None:
        self.until = self.leader = None
        for timer in ("end", "renew"):
            self._timer(timer, None, self._look)

    def leave(self, session: str = "", verdict: Verdict | None = None, *, may_free: bool) -> None:
        """Leave the key to another coordinator, or with a VERDICT, to hosts that were cut off.

        Unless it MAY_FREE the key, ranks may still run until the lease is over.
        """
        if self.until is None:
            return
        self._drop()
        self._leaves_until = self._clock.now() + _LEAVE_S
        if verdict is not None:
            value = _CODEC.write(LeaseHolder(self._launcher, "", 1, session, verdict)).decode()
            remembered_s = math.ceil(self.config.rdzv_timeout_s + self.config.heartbeat_timeout_s)
            self._store.ask(_ignore, "bury", self._lease, value, remembered_s)
        elif may_free:
            self._store.ask(_ignore, "revoke", self._lease)
        # Wake the loop when that is over.
        self._timer("left", self._leaves_until, self.stop_seeking)

    def close(self) -> None:
        """Stop asking."""
        self.stop_seeking()
        self._drop()
        self._timer("left", None, self.stop_seeking)
        self._store.close()

    def _timer(self, timer: str, at: float | None, call: Callable[[], None]) -> None:
        self._clock.timer((id(self), timer), at, call)


def _ignore(_: StoreAnswer) -> None:
    """Do nothing."""
