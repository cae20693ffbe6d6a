"""Which launcher coordinates a job whose roster is kept in etcd.

Its name stands in a key with a lease, which it renews; a launcher that finds the key free takes
it. Only the holder of the key can change the roster, so a coordinator that was cut off begins no
generation.
"""

from __future__ import annotations

import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

from fleetrun.errors import EnvironmentFault
from fleetrun.run.loop import Waiting
from fleetrun.session import jobrecord
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.jobrecord import JobRecord, LeaderRecord
from fleetrun.session.jobstore import JobStore, StoreAnswer


class ElectionCandidate(Protocol):
    """A launcher's session, as an election lets it lead or follow."""

    @abstractmethod
    def may_lead(self) -> bool:
        """Whether nothing runs here, and the next generation can be coordinated here."""

    @abstractmethod
    def listen(self, local: str) -> tuple[str, int]:
        """Listen, and return where; LOCAL is our address in the network of etcd."""

    def unlisten(self) -> None:
        """Listen no more."""

    def lead(self, job: JobRecord | None, lost_at: float) -> None:
        """Coordinate a new job (None) or a recorded JOB.

        LOST_AT (monotonic seconds) is when the last coordinator was known to be lost.
        """

    def follow(self) -> None:
        """Call the election's `leader`."""

    def unfollow(self) -> None:
        """Stop calling the leader, which is gone."""

    def resign(self, why: str, renewed_at: float) -> None:
        """Stop coordinating: another launcher may, from a while after RENEWED_AT on."""

    def renewed(self, at: float) -> None:
        """Note that nobody else coordinates until a while after AT."""

    def end(self, why: str) -> None:
        """End this launcher, as the job has ended; WHY says how."""

    def note(self, text: str) -> None:
        """Print TEXT, once."""


# The pause between two looks at the key: short at first, as hosts start together.
_FIRST_S, _LONGEST_S, _GROWTH = 0.05, 0.5, 1.3
# The pause between two attempts to renew a lease while etcd does not answer.
_AGAIN_S = 0.2
# How long storing the end of a job may take.
_LEAVE_S = 3.0
_NAME_BYTES = 8


class Election:
    """Finds a coordinator for a job; SESSION of LAUNCHER then leads or follows."""

    def __init__(
        self,
        config: RendezvousConfig,
        launcher: str,
        store: JobStore,
        waiting: Waiting,
        session: ElectionCandidate,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        # Of the job, once they are known.
        self.config = config
        self._launcher = launcher
        self._store = store
        self._waiting = waiting
        self._session = session
        # Why etcd does not answer.
        self.trouble = ""
        self.has_answered = False
        self.leader: LeaderRecord | None = None
        self.is_leading = False
        self.renewed_at = 0.0
        self._lease = self._revision = 0
        # The job that this launcher belongs to, if any yet.
        self._job: str | None = None
        # The job of the coordinator that it reached last, whose roster it may have missed.
        self._followed: str | None = None
        self._is_seeking = False
        self._is_looking = False
        self._pause_s = _FIRST_S
        # When the place was seen to be free.
        self._free_at: float | None = None
        self._leaves_until: float | None = None
        # Since when this coordinator has been short of hosts, and until when others may lead.
        self._short_at: float | None = None
        self._rests_until = 0.0

    @property
    def is_overdue(self) -> bool:
        """Whether others may take this coordinator for lost by now."""
        limit = self.renewed_at + self.config.warning_s
        return self.is_leading and self._is_replaceable and self._clock() >= limit

    @property
    def place(self) -> tuple[int, int]:
        """The revision of the key and the lease of this coordinator."""
        return self._revision, self._lease

    # A job that never restarts needs no other coordinator once its roster is formed.
    _is_replaceable = True

    def fix(self) -> None:
        """Keep this coordinator even without etcd, as the job neither changes nor restarts."""
        self._is_replaceable = False

    @property
    def is_busy(self) -> bool:
        """Whether the end of this coordinator is still being stored."""
        until = self._leaves_until
        return until is not None and self._store.is_busy and self._clock() < until

    def take_part(self) -> None:
        """Remember that this launcher belongs to the job of the coordinator that it follows."""
        self._short_at = None
        if self.leader is not None:
            self._job = self.leader.job

    # Finding the coordinator --------------------------------------------------------------------

    def seek(self) -> None:
        """Look for a coordinator, until `rest`."""
        if not self._is_seeking and not self.is_leading:
            self._is_seeking = True
            self._pause_s = _FIRST_S
            self._look()

    def rest(self) -> None:
        """Stop looking."""
        self._is_seeking = False
        self._timer("look", None, self._look)

    def connected(self) -> None:
        """Stop looking: the coordinator is connected."""
        self.rest()
        self._followed = None if self.leader is None else self.leader.job

    def _look(self) -> None:
        if self._is_seeking and not self._is_looking:
            self._is_looking = True
            self._store.ask(self._looked, "look")

    def _look_later(self) -> None:
        self._timer("look", self._clock() + self._pause_s, self._look)
        self._pause_s = min(self._pause_s * _GROWTH, _LONGEST_S)

    def _looked(self, answer: StoreAnswer) -> None:
        self._is_looking = False
        self.trouble = answer.trouble
        self.has_answered = self.has_answered or not answer.trouble
        if not self._is_seeking or self._leaves_until is not None:
            return
        self._look_later()
        if answer.trouble:
            return
        written, leader_revision, recorded, record_revision, local = answer.value
        if leader_revision:
            self._found(jobrecord.read_leader(written))
            return
        if self.leader is not None:
            # A launcher that answers there later leads another term.
            self.leader = None
            self._session.unfollow()
        if self._free_at is None:
            self._free_at = self._clock()
        if not self._session.may_lead() or self._clock() < self._rests_until:
            return
        record = jobrecord.read_record(recorded)
        if self._job is not None and (record is None or record.job != self._job):
            self.rest()
            self._session.end(
                "how the job ended is not known here: it ended without this host, or etcd has lost "
                "its record"
            )
            return
        if record is not None and record.job not in {self._job, self._followed}:
            # Its own hosts take precedence; by then, those that are cut off have ended their ranks.
            wait_s = record.config.quarantine_s + record.config.heartbeat_timeout_s
            if self._clock() < self._free_at + wait_s:
                self._session.note(
                    "etcd has the roster of a job of this name that has not ended: waiting "
                    f"{wait_s:.0f} s for its hosts"
                )
                return
            record = None
        self._campaign(record, record_revision, local)

    def _found(self, leader: LeaderRecord | None) -> None:
        """Follow LEADER, unless the key is left over from this launcher's own term."""
        self._free_at = None
        if leader is not None and leader.launcher != self._launcher:
            self._rests_until = 0.0
        if leader is None:
            self.trouble = "the value there is not from fleetrun"
        elif self._job is not None and leader.job != self._job:
            self.rest()
            self._session.end("another job of the same name has begun")
        elif leader.launcher != self._launcher and leader != self.leader:
            self.leader = leader
            self._session.follow()

    # Becoming it --------------------------------------------------------------------------------

    def _campaign(self, record: JobRecord | None, record_revision: int, local: str) -> None:
        try:
            host, port = self._session.listen(local)
        except EnvironmentFault as error:
            if record is None:
                raise
            # Another host can lead.
            self._session.note(str(error))
            return
        job = os.urandom(_NAME_BYTES).hex() if record is None else record.job
        generation = 0 if record is None else record.generation + 1
        leader = LeaderRecord(self._launcher, host, port, job, generation)
        if record is not None:
            self.config = record.config
        ttl_s = max(1, math.ceil(self.config.heartbeat_timeout_s))
        self._is_looking = True
        done = partial(self._campaigned, leader, record)
        self._store.ask(done, "campaign", jobrecord.write(leader), ttl_s, record_revision)

    def _campaigned(
        self, leader: LeaderRecord, record: JobRecord | None, answer: StoreAnswer
    ) -> None:
        self._is_looking = False
        self.trouble = answer.trouble
        if answer.value is None or not self._is_seeking:
            self._session.unlisten()
            self._pause_s = _FIRST_S
            self._look_later()
            return
        self._lease, self._revision = answer.value
        self.rest()
        self.leader, self.is_leading = leader, True
        lost_at, self._free_at = self._free_at or answer.asked_at, None
        self._renewed(answer.asked_at)
        self._session.lead(record, lost_at)

    # Being it -----------------------------------------------------------------------------------

    def _renewed(self, at: float) -> None:
        self.renewed_at = at
        self._timer("renew", at + self.config.heartbeat_s, self._renew)
        self._timer("overdue", at + self.config.warning_s, self.check)
        self._session.renewed(at)

    def _renew(self) -> None:
        if self.is_leading:
            self._store.ask(self._heard, "renew", self._lease)

    def _heard(self, answer: StoreAnswer) -> None:
        if not self.is_leading:
            return
        self.trouble = answer.trouble
        if answer.trouble:
            self._timer("renew", self._clock() + _AGAIN_S, self._renew)
        elif answer.value:
            self._renewed(answer.asked_at)
        elif self._is_replaceable:
            self._resign("etcd no longer accepts this coordinator")

    def check(self) -> None:
        """Resign if others may be elected soon."""
        if self.is_overdue:
            silence_s = self._clock() - self.renewed_at
            why = f" ({self.trouble})" if self.trouble else ""
            self._resign(f"etcd has not answered for {silence_s:.0f} s{why}")

    def give_way(self, why: str) -> None:
        """Let a launcher lead that may reach more hosts, for as long as the job waits."""
        config, now = self.config, self._clock()
        self._short_at = now if self._short_at is None else self._short_at
        wait_s = config.elastic_timeout_s if config.may_change else config.rdzv_timeout_s
        if self.is_leading and self._is_replaceable and now < self._short_at + wait_s:
            self._rests_until = now + config.heartbeat_timeout_s
            self._free(is_final=False)
            self._resign(why)

    def _resign(self, why: str) -> None:
        self.is_leading = False
        self.leader = None
        self._timer("renew", None, self._renew)
        self._timer("overdue", None, self.check)
        self._session.resign(why, self.renewed_at)

    def keep(self, record: JobRecord, kept: Callable[[], None]) -> None:
        """Store RECORD, then call KEPT if this is still the coordinator."""
        # Nobody needs the record of a job that never restarts once its coordinator is lost.
        lease = 0 if self.config.starts_again else self._lease

        def answered(answer: StoreAnswer) -> None:
            if not self.is_leading:
                return
            self.trouble = answer.trouble
            if answer.trouble:
                again = partial(self.keep, record, kept)
                self._timer("keep", self._clock() + _AGAIN_S, again)
            elif answer.value:
                self._short_at = None
                kept()
            else:
                self._resign("another host has become the coordinator")

        self._store.ask(answered, "keep", jobrecord.write(record), self._revision, lease)

    def leave(self, *, is_final: bool) -> None:
        """Stop coordinating, as nothing runs any more; IS_FINAL: the job has ended."""
        if not self.is_leading:
            return
        self.is_leading = False
        self._leaves_until = self._clock() + _LEAVE_S
        for timer in ("renew", "overdue", "keep"):
            self._timer(timer, None, self._renew)
        self._free(is_final=is_final)
        # Wake the loop when that is over.
        self._timer("left", self._leaves_until, self.rest)

    def _free(self, *, is_final: bool) -> None:
        """Free the place for another coordinator, or for another job."""
        self._store.ask(lambda _: None, "leave", self._revision, self._lease, is_final)

    def close(self) -> None:
        """Stop asking."""
        self.is_leading = self._is_seeking = False
        for timer in ("look", "renew", "overdue", "keep", "left"):
            self._timer(timer, None, self._renew)
        self._store.close()

    def _timer(self, timer: str, at: float | None, call: Callable[[], None]) -> None:
        self._waiting.timer((id(self), timer), at, call)
