"""The coordinator at work: feeds `coordinator.step` with what launchers say, and acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fleetrun.run.loop import LoopShare, nothing
from fleetrun.session import coordinator, messages
from fleetrun.session.connecting import Listener
from fleetrun.session.wire import Connection, ignore


class SessionClock(LoopShare):
    """A share of the loop, and the time; the session outlives the observers that lend it theirs."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(None)
        self.now = now


class LocalLink:
    """One end of the connection between the coordinator and the launcher that it is in."""

    def __init__(self, clock: SessionClock, address: str, peer: LocalLink | None = None) -> None:
        self.address = address
        self.heard: Callable[[Any], None] = ignore
        self.lost: Callable[[], None] = nothing
        self.peer = peer or LocalLink(clock, address, self)
        self._clock = clock
        self.is_open = True

    def send(self, message: tuple[object, ...]) -> None:
        """Let the other end hear MESSAGE, from the loop."""
        if self.is_open:
            self._soon(lambda: self.peer.heard(message))

    def finish(self) -> None:
        """Hang up after what was sent."""
        if self.is_open:
            self.is_open = False
            self._soon(lambda: self.peer.lost())  # noqa: PLW0108 - as it is then

    close = finish

    def _soon(self, call: Callable[[], None]) -> None:
        # The loop keeps the order.
        self._clock.timer(object(), self._clock.now(), call)


class Server:
    """The coordinator at work, from STATE on.

    PROMISE_S returns for how long nobody replaces it; HEARERS get what hosts with a place send
    beside the protocol, with their node ranks.
    """

    def __init__(
        self,
        clock: SessionClock,
        state: coordinator.State,
        listener: Listener,
        promise_s: Callable[[], float],
        hearers: Mapping[type, Callable[[int, Any], None]],
    ) -> None:
        self.state, self._listener = state, listener
        self._clock, self._promise_s = clock, promise_s
        self._hearers = hearers
        # All whose other ends have not hung up yet, by their numbers.
        self.links: dict[int, Connection | LocalLink] = {}
        self._number, self._looked_at = 0, self._clock.now()
        self._look()

    def take(self, link: Connection | LocalLink) -> None:
        """Hear a launcher, which has just been connected."""
        number = self._number = self._number + 1
        self.links[number] = link
        link.heard, link.lost = partial(self._heard, number), partial(self._lost, number)

    def finish(self) -> None:
        """End all connections once everything is sent."""
        self._listener.close()
        self._clock.timer((id(self), "look"), None, nothing)
        for number in self.links:
            self._hang_up(number)

    def _look(self) -> None:
        now, look_s = self._clock.now(), self.state.config.look_s
        stood_s, self._looked_at = max(0.0, now - self._looked_at - look_s), now
        self._clock.timer((id(self), "look"), now + look_s, self._look)
        self._feed(coordinator.Tick(now, stood_s))

    def _heard(self, number: int, message: Any) -> None:  # noqa: ANN401 - any message
        link, host = self.links[number], self.state.hosts.get(number)
        if isinstance(message, messages.FromMember):
            now, is_local = self._clock.now(), isinstance(link, LocalLink)
            promise_s = self._promise_s()
            self._feed(coordinator.Heard(number, message, now, link.address, is_local, promise_s))
            if is_local and isinstance(message, messages.Join):
                # The coordinator's own host comes first, which the others must match.
                self._listener.open(self.take)
        elif not isinstance(message, messages.Aside):
            self._hang_up(number)
        elif host is not None and host.place is not None and type(message) in self._hearers:
            self._hearers[type(message)](host.place, message)

    def _lost(self, number: int) -> None:
        del self.links[number]
        self._feed(coordinator.Broken(number, self._clock.now()))

    def _feed(self, event: coordinator.Event) -> None:
        if event.at > self._looked_at + self.state.config.look_s:
            # If this launcher stood still, that comes first: the others have only given it up.
            self._look()
        self.state, actions = coordinator.step(self.state, event)
        for numbers, message in actions:
            for number in numbers:
                if message is None:
                    self._hang_up(number)
                elif number in self.links:
                    self.links[number].send(message)

    def _hang_up(self, number: int) -> None:
        if (link := self.links.get(number)) is not None:
            link.heard, link.lost = ignore, partial(self.links.__delitem__, number)
            link.finish()
