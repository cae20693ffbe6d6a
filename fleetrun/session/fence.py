"""How long ranks may run here without a word from the coordinator.

Each answer to a heartbeat says how long ranks may run from the moment that this heartbeat was
*sent*. Before that time is over they are dead, because then the others may start again without
them: they are asked to end 1.5 margins before, and the keeper kills them half a margin before, even
if this launcher stands still. Times are this launcher's own, and monotonic.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetrun.run.loop import nothing
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.messages import Acknowledged, Heartbeat
from fleetrun.session.serving import SessionClock
from fleetrun.session.wire import ignore


class Fence:
    """Sends heartbeats, and has ranks ended in time if they stay without an answer.

    STOP asks ranks to end; LOSE is called when the coordinator has given up this host.
    """

    def __init__(
        self,
        clock: SessionClock,
        config: RendezvousConfig,
        *,
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
        self._is_asked = self._is_connected = False
        # Until when others do not start without this host, and when the coordinator gives it up.
        self._safe_until = self._end_at = 0.0
        # When each heartbeat without an answer was sent; the Join counts as number 0.
        self._unanswered: dict[int, float] = {}
        self._number = 0

    # The connection -------------------------------------------------------------------------------

    def connect(self) -> None:
        """Count from anew, on a new connection."""
        self._is_connected = True
        self._unanswered, self._number = {}, 0

    def disconnect(self) -> None:
        """Beat no more; ranks that run are still killed in time."""
        self._is_connected = False
        self._clock.timer((id(self), "heartbeat"), None, nothing)

    def joined(self) -> None:
        """Take note that a Join was sent."""
        if not self._number:
            self._unanswered[0] = self._clock.now()
            self._promise(self._unanswered[0], 0.0)
            self._beat_later()

    def obey(self, config: RendezvousConfig) -> None:
        """Beat as often as the coordinator's CONFIG requires."""
        is_new, self.config = config != self.config, config
        if is_new and self._is_connected:
            self._beat_later()

    def _beat_later(self) -> None:
        at = self._clock.now() + self.config.heartbeat_s
        self._clock.timer((id(self), "heartbeat"), at, self.beat)

    def beat(self) -> None:
        """Send a heartbeat."""
        self._number += 1
        self._unanswered[self._number] = self._clock.now()
        self._send(Heartbeat(self._number))
        self._beat_later()

    def answered(self, answer: Acknowledged) -> None:
        """Take the answer to a heartbeat."""
        sent_at = self._unanswered.get(answer.number)
        if sent_at is not None:
            self._promise(sent_at, answer.left_s)
            later = {n: at for n, at in self._unanswered.items() if n > answer.number}
            self._unanswered = later

    # Ranks ----------------------------------------------------------------------------------------

    @property
    def _ask_at(self) -> float:
        return self._safe_until - 1.5 * self.config.margin_s

    @property
    def _kill_at(self) -> float:
        return self._safe_until - 0.5 * self.config.margin_s

    def start(self) -> bool:
        """Let ranks run; False: the others may have started again without this host by now."""
        if self._clock.now() >= self._ask_at:
            return False
        self.may_run, self._is_asked = True, False
        self._promise(0.0, 0.0)
        return True

    def guard(self, kill_at: Callable[[float | None], None]) -> None:
        """Let KILL_AT have the ranks killed at a moment, or no longer (None)."""
        self._guard = kill_at
        kill_at(self._kill_at if self.may_run else None)

    def stopped(self) -> None:
        """Take note that no rank runs here any more."""
        self.may_run = False
        self._guard(None)

    def was_killed(self) -> bool:
        """Whether ranks were killed because this launcher stood still."""
        return self.may_run and self._clock.now() >= self._kill_at and not self._is_asked

    def _promise(self, sent_at: float, left_s: float) -> None:
        """Let ranks run for LEFT_S after SENT_AT; each such promise holds, whatever follows."""
        self._safe_until = max(self._safe_until, sent_at + left_s)
        # While nothing runs, a coordinator that is too busy to answer yet is waited for.
        given_up_at = sent_at + self.config.heartbeat_timeout_s
        self._end_at = max(self._end_at, self._safe_until, given_up_at)
        if self.may_run:
            self._guard(self._kill_at)
        self._look_at(self._ask_at if self.may_run else self._end_at)

    def _look_at(self, at: float) -> None:
        self._clock.timer((id(self), "fence"), at, self._look)

    def _look(self) -> None:
        """End what has no promise beyond this moment."""
        now = self._clock.now()
        if self.may_run and not self._is_asked and now >= self._ask_at:
            self._is_asked = True
            self._stop()
        if now < self._end_at:
            self._look_at(self._end_at)
        elif self._is_connected:
            self._lose()

    def close(self) -> None:
        """End nothing any more: nothing runs here."""
        self.disconnect()
        self._clock.timer((id(self), "fence"), None, nothing)
