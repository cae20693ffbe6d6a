"""How long ranks may run here without a word from the coordinator.

Each answer to a heartbeat says how long ranks may run from the moment that this heartbeat was
*sent*. Before that time is over they are dead, because then the others may start again without
them: they are asked to end, and then the keeper kills them, even if this launcher stands still.
Times are this launcher's own, and monotonic.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetrun.run.loop import nothing
from fleetrun.session.messages import Acknowledged, Heartbeat, RendezvousConfig
from fleetrun.session.serving import SessionClock
from fleetrun.session.wire import ignore

# In margins before others may start again: when ranks are asked to end, and when they are killed.
_ASK, _KILL = 1.5, 0.5


class Fence:
    """Sends heartbeats, and has ranks ended in time if they stay without an answer.

    STOP asks ranks to end; LOSE is called when the coordinator has given up this host.
    """

    def __init__(
        self,
        clock: SessionClock,
        config: RendezvousConfig,
        send: Callable[[Heartbeat], None],
        stop: Callable[[], None],
        lose: Callable[[], None],
    ) -> None:
        # This launcher's own until it learns the coordinator's.
        self.config = config
        # Whether ranks may run here.
        self.may_run = False
        self._clock = clock
        self._send, self._stop, self._lose = send, stop, lose
        # Has the keeper kill the ranks at a moment (None: no longer).
        self._guard: Callable[[float | None], None] = ignore
        self._is_asked = self._is_joined = False
        # Until when others do not start without this host, and when the coordinator gives it up.
        self._safe_until = self._end_at = 0.0
        # When each heartbeat without an answer was sent.
        self._unanswered: dict[int, float] = {}
        self._number = 0

    def _timer(self, timer: str, at: float | None, call: Callable[[], None] = nothing) -> None:
        self._clock.timer((id(self), timer), at, call)

    def joined(self) -> None:
        """Take note that a Join was sent, the first one of a connection as heartbeat 0."""
        if not self._is_joined:
            self._is_joined, self._number = True, 0
            self._unanswered = {0: self._clock.now()}
            self._promise(self._clock.now(), 0.0)
            self._beat_later()

    def disconnect(self) -> None:
        """Beat no more; ranks that run are still killed in time."""
        self._is_joined = False
        self._timer("heartbeat", None)

    def beat(self) -> None:
        """Send a heartbeat."""
        self._number += 1
        self._unanswered[self._number] = self._clock.now()
        self._send(Heartbeat(self._number))
        self._beat_later()

    def _beat_later(self) -> None:
        self._timer("heartbeat", self._clock.now() + self.config.heartbeat_s, self.beat)

    def answered(self, answer: Acknowledged) -> None:
        """Take the answer to a heartbeat."""
        if (sent_at := self._unanswered.pop(answer.number, None)) is not None:
            self._promise(sent_at, answer.left_s)

    def _before_end(self, margins: float) -> float:
        return self._safe_until - margins * self.config.margin_s

    def start(self) -> bool:
        """Let ranks run; False: the others may have started again without this host by now."""
        if self._clock.now() >= self._before_end(_ASK):
            return False
        self.may_run, self._is_asked = True, False
        self._promise(0.0, 0.0)
        return True

    def guard(self, kill_at: Callable[[float | None], None]) -> None:
        """Let KILL_AT have the ranks killed at a moment, or no longer (None)."""
        self._guard = kill_at
        kill_at(self._before_end(_KILL) if self.may_run else None)

    def stopped(self) -> None:
        """Take note that no rank runs here any more."""
        self.may_run = False
        self._timer("ask", None)
        self._guard(None)

    def was_killed(self) -> bool:
        """Whether ranks were killed because this launcher stood still."""
        return self.may_run and self._clock.now() >= self._before_end(_KILL) and not self._is_asked

    def _promise(self, sent_at: float, left_s: float) -> None:
        # Each such promise holds, whatever follows.
        self._safe_until = max(self._safe_until, sent_at + left_s)
        if self.may_run:
            self._guard(self._before_end(_KILL))
            self._timer("ask", self._before_end(_ASK), self._ask)
        # While nothing runs, a coordinator that is too busy to answer yet is waited for.
        given_up_at = sent_at + self.config.heartbeat_timeout_s
        self._end_at = max(self._end_at, self._safe_until, given_up_at)
        self._timer("end", self._end_at, self._end)

    def _ask(self) -> None:
        self._is_asked = True
        self._stop()

    def _end(self) -> None:
        if self._is_joined:
            self._lose()
