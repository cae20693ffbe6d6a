"""Check-ups of a job's hosts connect to each other on the ports that the job will use.

Each host listens on its own ports and calls those of all others, as launchers do. Both ends then
introduce themselves: the versions that matter to a job, and the time by their clock.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault
from fleetrun.model import Member
from fleetrun.run.loop import Loop, nothing
from fleetrun.session.codec import Codec
from fleetrun.session.connecting import EVERYWHERE, Dialer, Listener
from fleetrun.session.wire import Connection, Key, Wire, ignore

# After this long, log who is awaited, naming at most this many.
_SILENCE_S, _MOST_NAMED = 1.0, 5


class Connect(NamedTuple):
    """An attempt to connect to one port of another host.

    `outcome` is connected, refused (the host answers, nothing listens), silent (no answer at all),
    or another program (which listens there); `text` says more.
    """

    port: int
    outcome: str
    text: str = ""


class HostDescription(NamedTuple):
    """The properties that hosts exchange and compare."""

    host: str
    fleetrun: str
    python: str
    paddle: str
    cuda: str
    nccl: str
    driver: str


class Peer(NamedTuple):
    """Another host of the job; `card` is None if it did not answer."""

    host: str
    connects: tuple[Connect, ...]
    card: HostDescription | None = None
    # By how many seconds its clock is ahead of ours, and the error of that.
    ahead_s: float = 0.0
    accuracy_s: float = 0.0


class Introduction(NamedTuple):
    """Which host of the job this is, the port that was called, and the time by its clock."""

    node: int
    port: int
    clock: float
    description: HostDescription


CODEC = Codec(Introduction)


class PeerCheck:
    """Calls all MEMBERS but our own, the one of OWN_INDEX, within TIMEOUT_S seconds."""

    def __init__(
        self,
        members: Sequence[Member],
        own_index: int,
        description: HostDescription,
        *,
        key: Key,
        timeout_s: float,
    ) -> None:
        self._members, self._own_index, self._description = members, own_index, description
        self._until = time.monotonic() + timeout_s
        self._loop = Loop()
        self._wire = Wire(key, CODEC, self._loop)
        # Which hosts have called which of our ports, and what the ones that we called answered.
        self._came: set[tuple[int, int]] = set()
        self._peers: dict[tuple[str, int], Peer] = {}
        self._dialers: dict[tuple[str, int], Dialer] = {}
        self._callers: list[Connection] = []

    def run(
        self, address: str | None = None, log: Callable[[str], None] | None = None
    ) -> tuple[Peer, ...]:
        """Return the results once all hosts have called all, or time is up.

        We listen on ADDRESS, or on all. A port that cannot be bound is left out. LOG gets a line
        about who is awaited if that takes longer than a second.
        """
        ports = self._members[self._own_index].ports
        others = [host for node, host in enumerate(self._members) if node != self._own_index]
        addresses = (address or EVERYWHERE,)
        listeners = [Listener(addresses, port, self._wire, opened=self._called) for port in ports]
        for listener in listeners:
            # A port that is taken is a finding of its own.
            with suppress(EnvironmentFault):
                listener.prepare()
                listener.open()
        for target in [(host.host, port) for host in others for port in host.ports]:
            opened = partial(self._reached, target)
            self._dialers[target] = Dialer(*target, self._wire, opened=opened)
            self._dialers[target].begin()
        self._loop.timer("late", self._until, nothing)
        if log is not None:
            remark_at = time.monotonic() + _SILENCE_S
            self._loop.timer("remark", remark_at, partial(self._log_missing, log))
        expected = len(ports) * len(others)
        while time.monotonic() < self._until and (
            len(self._peers) < len(self._dialers) or len(self._came) < expected
        ):
            self._loop.turn()
        peers = tuple(map(self._peer, others))
        for dialer in self._dialers.values():
            dialer.hang_up()
        for caller in self._callers:
            caller.close()
        for listener in listeners:
            listener.close()
        self._loop.close()
        return peers

    def _log_missing(self, log: Callable[[str], None]) -> None:
        came = {self._own_index, *(node for node, _ in self._came)}
        late = [host.host for node, host in enumerate(self._members) if node not in came]
        if late:
            shown = ", ".join(late[:_MOST_NAMED]) + (", ..." if late[_MOST_NAMED:] else "")
            left_s = max(0.0, self._until - time.monotonic())
            log(f"Waiting up to {left_s:.0f} s for the check-ups of {shown}.")

    def _introduction(self, port: int) -> Introduction:
        return Introduction(self._own_index, port, time.time(), self._description)

    def _called(self, caller: Connection) -> None:
        """Answer the caller, which then hangs up."""

        def receive(message: Introduction) -> None:
            caller.send(self._introduction(message.port))
            caller.lost = lambda _: self._came.add((message.node, message.port))

        self._callers.append(caller)
        caller.heard, caller.lost = receive, ignore

    def _reached(self, target: tuple[str, int], connection: Connection) -> None:
        """Introduce this host, and note who answers, and when."""
        began, wall = time.monotonic(), time.time()

        def receive(message: Introduction) -> None:
            half_s = (time.monotonic() - began) / 2
            ahead_s = message.clock - (wall + half_s)
            self._peers[target] = Peer(target[0], (), message.description, ahead_s, half_s)
            connection.close()

        connection.heard = receive
        connection.lost = lambda _: self._dialers[target].begin()
        connection.send(self._introduction(target[1]))

    def _peer(self, host: Member) -> Peer:
        """Return what is known about HOST, with the clock of the fastest answer."""
        connects, best = [], Peer(host.host, ())
        for port in host.ports:
            peer, dialer = self._peers.get((host.host, port)), self._dialers[host.host, port]
            if peer is None:
                connects.append(Connect(port, dialer.outcome, dialer.trouble or "no answer"))
                continue
            connects.append(Connect(port, "connected"))
            if best.card is None or peer.accuracy_s < best.accuracy_s:
                best = peer
        return best._replace(connects=tuple(connects))
