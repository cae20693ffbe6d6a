"""The coordinator at work: feeds `coordinator.step` with what launchers say, and acts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from fleetrun.run.loop import LoopShare, nothing
from fleetrun.session import coordinator, exchange, messages
from fleetrun.session.wire import Connection, ignore

# A launcher joins as soon as it is connected; on a bad network that takes seconds.
_JOIN_S = 10.0


class SessionClock(LoopShare):
    """A share of the loop, and the time; the session outlives the observers that lend it theirs."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(None)
        self.now = now

    def soon(self, key: Hashable, call: Callable[[], None]) -> None:
        """Call once from the loop."""
        self.timer(key, self.now(), call)


class LocalLink:
    """One end of the connection between the coordinator and the launcher that it is in."""

    def __init__(self, clock: SessionClock, address: str, peer: LocalLink | None = None) -> None:
        self.address = address
        self.heard: Callable[[Any], None] = ignore
        self.lost: Callable[[], None] = nothing
        self.peer = peer or LocalLink(clock, address, self)
        self._clock = clock
        self._calls: list[Callable[[], None]] = []
        self._is_open = True

    def send(self, message: tuple[object, ...]) -> None:
        """Let the other end hear MESSAGE, from the loop."""
        if self._is_open:
            self._later(lambda: self.peer.heard(message))

    def finish(self) -> None:
        """Hang up after what was sent."""
        if self._is_open:
            self._later(self.peer.lose)
            self._is_open = False

    def lose(self) -> None:
        """Report that the other end has hung up."""
        self.lost()

    def _later(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._clock.soon((id(self), "calls"), self._turn)

    def _turn(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()


class Server:
    """The coordinator at work, from STATE on.

    PROMISE_S returns for how long nobody replaces it; RECEIVED gets what hosts with a place send
    beside the protocol, with their node ranks; STEPPED is called after each step.
    """

    def __init__(
        self,
        clock: SessionClock,
        state: coordinator.State,
        *,
        promise_s: Callable[[], float],
        received: Callable[[int, Any], None],
        stepped: Callable[[], None],
    ) -> None:
        self.state = state
        self._clock, self._promise_s = clock, promise_s
        self._received, self._stepped = received, stepped
        self._links: dict[int, Connection | LocalLink] = {}
        # All that have not been closed yet, also those that are hung up on.
        self._connections: list[Connection] = []
        self._number = 0
        self._looked_at = self._clock.now()
        self._look_later()

    @property
    def is_over(self) -> bool:
        """Whether all have heard how the job ended, and left."""
        return self.state.phase == coordinator.ENDED and not self.state.hosts

    @property
    def is_idle(self) -> bool:
        """Whether no rank can run anywhere by the word of this coordinator."""
        is_between = self.state.phase in {coordinator.FORMING, coordinator.ENDED}
        return is_between and self._clock.now() >= self.state.not_before

    def take(self, link: Connection | LocalLink) -> None:
        """Hear a launcher, which has just been connected."""
        self._number += 1
        number = self._number
        self._links[number] = link
        if not isinstance(link, LocalLink):
            is_open = [other for other in self._connections if other.is_open]
            self._connections = [*is_open, link]
        link.heard, link.lost = partial(self._heard, number), partial(self._lost, number)
        until = self._clock.now() + _JOIN_S
        self._clock.timer((id(self), number), until, partial(self._expect, number))

    def finish(self) -> None:
        """End all connections once everything is sent."""
        for key in ("look", *self._links):
            self._clock.timer((id(self), key), None, nothing)
        for number in list(self._links):
            self._hang_up(number)

    def close(self) -> None:
        """End all connections at once."""
        self.finish()
        for connection in self._connections:
            connection.close()

    def _look_later(self) -> None:
        at = self._clock.now() + self.state.config.look_s
        self._clock.timer((id(self), "look"), at, self._look)

    def _look(self) -> None:
        now = self._clock.now()
        stood_s = max(0.0, now - self._looked_at - self.state.config.look_s)
        self._looked_at = now
        self._look_later()
        self._feed(coordinator.Tick(now, stood_s))

    def _expect(self, number: int) -> None:
        if number not in self.state.hosts:
            self._hang_up(number)

    def _heard(self, number: int, message: Any) -> None:  # noqa: ANN401 - any message
        link, host = self._links[number], self.state.hosts.get(number)
        if isinstance(message, messages.FromMember):
            now, is_local = self._clock.now(), isinstance(link, LocalLink)
            promise_s = self._promise_s()
            self._feed(coordinator.Heard(number, message, now, link.address, is_local, promise_s))
        elif not isinstance(message, exchange.FromMember):
            self._hang_up(number)
        elif host is not None and host.place is not None:
            self._received(host.place, message)

    def _lost(self, number: int) -> None:
        self._links.pop(number, None)
        self._feed(coordinator.Broken(number, self._clock.now()))

    def _feed(self, event: coordinator.Event) -> None:
        self.state, actions = coordinator.step(self.state, event)
        for numbers, message in actions:
            for number in numbers:
                if message is None:
                    self._hang_up(number)
                elif number in self._links:
                    self._links[number].send(message)
        self._stepped()

    def _hang_up(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            link.heard, link.lost = ignore, nothing
            link.finish()
