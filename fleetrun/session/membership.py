"""A launcher's membership in a session: one connection, from its Join to its end.

It has no phases of its own: the run policy gathers, runs and stops, and the coordinator tells it
when. What it adds is time: it sends heartbeats, each answer says how long ranks may run from the
moment that this heartbeat was sent, and before that time is over they are dead, because then the
others may start again without them.
"""

from __future__ import annotations

from math import inf
from typing import Any, Protocol

from fleetrun.run.events import Failure
from fleetrun.run.loop import nothing
from fleetrun.session import exchange
from fleetrun.session.callers import LocalLink, SessionClock, ignore
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.connection import Connection
from fleetrun.session.coordinator import stood_still
from fleetrun.session.messages import (
    LOST,
    Acknowledged,
    Failed,
    FromMember,
    Heartbeat,
    Join,
    JoinRequest,
    LastRun,
    Leave,
    Missing,
    Refused,
    RosterMessage,
    Start,
    Stop,
    Stopped,
    Verdict,
)


class MemberPolicy(Protocol):
    """What a launcher does when the coordinator tells it to."""

    def wait(self, missing: Missing) -> None:
        """Show who is waited for."""

    def prepare(self, roster: RosterMessage) -> None:
        """Plan this host's part; HostReady or Stopped follows."""

    def start(self, roster: RosterMessage) -> None:
        """Start the ranks."""

    def stop(self, failure: Failure) -> None:
        """Ask all ranks to end; Stopped follows."""

    def kill(self, failure: Failure) -> None:
        """Kill all ranks now, because the others may start again; Stopped follows."""

    def kill_at(self, at: float | None) -> None:
        """Have the ranks killed at that moment even if this launcher stands still."""

    def judge(self, verdict: Verdict) -> None:
        """End, or gather again."""

    def refuse(self, why: str) -> None:
        """End: the job takes place without this host."""

    def lose(self, failure: Failure) -> None:
        """There is no coordinator any more: ask all ranks to end."""

    def received(self, node_rank: int, message: Any) -> None:  # noqa: ANN401 - any message
        """Take a message outside the protocol."""


class Membership:
    """The membership of LAUNCHER, which has CONFIG until it learns the coordinator's.

    POLICY does what the coordinator says.
    """

    def __init__(
        self, clock: SessionClock, launcher: str, policy: MemberPolicy, config: RendezvousConfig
    ) -> None:
        self.launcher, self.config = launcher, config
        # The coordinator's host, and this one, for people.
        self.coordinator = self.host = ""
        self.roster: RosterMessage | None = None
        # The last generation that has started here.
        self.last: LastRun | None = None
        self._clock, self._policy = clock, policy
        self._link: Connection | LocalLink | None = None
        self._join: Join | None = None
        # Whether ranks may run here.
        self.may_run = self._is_warned = False
        # When ranks must be dead, and when the coordinator has given up this host.
        self._fence_at = self._end_at = 0.0
        # When the next heartbeat is due, and how long this launcher has stood still.
        self._beat_at, self._stood_s = inf, 0.0
        # When each heartbeat without an answer was sent.
        self._unanswered: dict[int, float] = {}
        self._number = 0

    @property
    def is_connected(self) -> bool:
        """Whether there is a coordinator."""
        return self._link is not None

    def connect(self, link: Connection | LocalLink) -> None:
        """Take part by LINK, which has just been opened."""
        self.disconnect()
        self._link = link
        link.heard, link.lost = self._hear, self._lose
        self._unanswered, self._number = {}, 0
        if self._join is not None:
            self._send_join()

    def disconnect(self) -> None:
        """Hang up; ranks that run are still killed in time."""
        link, self._link = self._link, None
        self._beat_no_more()
        if link is not None:
            link.heard = link.lost = ignore
            link.finish()

    def join(self, request: JoinRequest, failure: Failure | None = None) -> None:
        """Ask for a place in the next generation, or report in FAILURE why this host cannot."""
        self._join = Join(self.launcher, request, failure)
        if self._link is not None:
            self._send_join()

    def say(self, message: FromMember) -> None:
        """Tell the coordinator, if there is one."""
        if isinstance(message, Failed | Stopped) and message.failure is not None:
            message = message._replace(failure=self._true_cause(message.failure))
        if isinstance(message, Stopped):
            self.may_run = False
            self._policy.kill_at(None)
        if self._link is not None:
            self._link.send(message)

    def leave(self, failure: Failure | None = None) -> None:
        """End the membership; nothing runs here."""
        self.say(Leave(failure))
        self.disconnect()
        self._clock.timer((id(self), "fence"), None, nothing)

    def _send_join(self) -> None:
        assert self._link is not None
        assert self._join is not None
        self._link.send(self._join._replace(last=self.last))
        if not self._number:
            self._unanswered[0] = self._clock.now()
            self._promise(self._unanswered[0], 0.0)
            self._beat_later()

    def _beat_later(self) -> None:
        self._beat_at = self._clock.now() + self.config.heartbeat_s
        self._clock.timer((id(self), "heartbeat"), self._beat_at, self._beat)

    def _beat_no_more(self) -> None:
        self._beat_at = inf
        self._clock.timer((id(self), "heartbeat"), None, nothing)

    def _beat(self) -> None:
        self._stood_s = self._stands_s()
        self._number += 1
        self._unanswered[self._number] = self._clock.now()
        self.say(Heartbeat(self._number))
        self._beat_later()

    def _hear(self, message: Any) -> None:  # noqa: ANN401 - any message
        match message:
            case Acknowledged(number=number, left_s=left_s) if number in self._unanswered:
                self._stood_s = 0.0
                self._promise(self._unanswered[number], left_s)
                self._unanswered = {n: at for n, at in self._unanswered.items() if n > number}
            case Missing(config=config):
                self._obey(config)
                self._policy.wait(message)
            case RosterMessage(config=config):
                self._obey(config)
                self.roster, self._join = message, None
                self._policy.prepare(message)
            case Start(generation=generation) if self._is_current(generation):
                self._start()
            case Stop(generation=generation, failure=failure) if self._is_current(generation):
                self._policy.stop(failure)
            case Verdict():
                self._policy.judge(message)
            case Refused(why=why):
                self._join = None
                self.disconnect()
                self._policy.refuse(why)
            case _ if isinstance(message, exchange.FromCoordinator):
                self._policy.received(0, message)
            case _:
                pass

    def _obey(self, config: RendezvousConfig) -> None:
        is_new, self.config = config != self.config, config
        if is_new:
            self._beat_later()

    def _is_current(self, generation: int) -> bool:
        return self.roster is not None and generation == self.roster.generation

    def _start(self) -> None:
        roster = self.roster
        assert roster is not None
        # If this launcher stood still, the others may have started again without it by now.
        if self._clock.now() >= self._fence_at:
            self.say(Stopped(roster.generation, self.loss()))
            return
        self.may_run, self._is_warned = True, False
        self.last = LastRun(roster.session, roster.generation, roster.restarts, len(roster.entries))
        self._promise(0.0, 0.0)
        self._policy.start(roster)

    # Time -----------------------------------------------------------------------------------------

    def _promise(self, sent_at: float, left_s: float) -> None:
        """Let ranks run for LEFT_S after SENT_AT; each such promise holds, whatever follows."""
        end_at = sent_at + left_s
        self._fence_at = max(self._fence_at, end_at - self.config.margin_s)
        # While nothing runs, a coordinator that is too busy to answer yet is waited for.
        self._end_at = max(self._end_at, end_at, sent_at + self.config.heartbeat_timeout_s)
        if self.may_run:
            self._policy.kill_at(self._guard_at)
        self._look_at(self._warn_at if self.may_run else self._end_at)

    @property
    def _warn_at(self) -> float:
        """When ranks are asked to end."""
        return self._fence_at - self.config.margin_s / 2

    @property
    def _guard_at(self) -> float:
        """When ranks are killed even if this launcher stands still."""
        return self._fence_at + self.config.margin_s / 2

    def _look_at(self, at: float) -> None:
        self._clock.timer((id(self), "fence"), at, self._look)

    def _look(self) -> None:
        """Nothing was promised beyond this moment."""
        now = self._clock.now()
        if self.may_run and not self._is_warned and now >= self._warn_at:
            self._is_warned = True
            loss = self.loss()
            assert self.roster is not None
            self.say(Failed(self.roster.generation, loss))
            self._policy.stop(loss)
        if self.may_run and now >= self._fence_at:
            self._policy.kill(self.loss())
        if now >= self._end_at and self._link is not None:
            self.disconnect()
            self._policy.lose(self.loss())
        later = [at for at in (self._fence_at, self._end_at) if at > now]
        if later:
            self._look_at(later[0])

    def loss(self) -> Failure:
        """Return the failure that the coordinator and this launcher have lost each other."""
        what = f"fleetrun was cut off from the coordinator ({self.coordinator})"
        stood_s = self._stands_s()
        if stood_s > self.config.heartbeat_timeout_s / 2:
            what = stood_still(stood_s)
        return self._lost(self.host, what)

    def _stands_s(self) -> float:
        """Return how long this launcher has not been running, of late."""
        return max(self._stood_s, self._clock.now() - self._beat_at)

    def _lost(self, where: str, what: str) -> Failure:
        # A victim, as a rank that loses a peer: a failure of its own on any host is the cause.
        may_change = self.config.may_change
        return Failure(where, what, LOST, is_victim=True, is_departure=may_change)

    def _true_cause(self, failure: Failure) -> Failure:
        """Return FAILURE, unless ranks were killed meanwhile because this launcher stood still."""
        is_late = self.may_run and self._clock.now() >= self._guard_at
        return self.loss() if is_late and not self._is_warned else failure

    def _lose(self, _why: str) -> None:
        self._link = None
        self._beat_no_more()
        what = "the coordinator of the job was lost"
        self._policy.lose(self._lost(self.coordinator, what))
