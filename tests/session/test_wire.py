"""Launchers that call each other over real sockets, and strangers that send anything."""

from __future__ import annotations

import random
import socket
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import ports
import pytest
from wire import CODEC, End, Hello, turn_until

from fleetrun.session.codec import Malformed
from fleetrun.session.connecting import STRANGER, Dialer, Listener
from fleetrun.session.wire import Connection, Seal, Wire, job_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleetrun.run.loop import Loop

KEY = job_key("job", "a token")
HERE = "127.0.0.1"


class Side:
    """One side of connections: the callers, their messages, and those that were lost."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.heard: list[tuple[object, ...]] = []
        self.lost: list[Connection] = []
        self.refused: list[str] = []

    def opened(self, connection: Connection) -> None:
        """Take CONNECTION."""
        connection.heard = self.heard.append
        connection.lost = partial(self.lost.append, connection)
        self.connections.append(connection)


class Net:
    """A listener and the callers of a test, closed at its end."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.port = ports.free(1)[0]
        self.server = Side()
        self.listeners: list[Listener] = []
        self.dialers: list[Dialer] = []
        self.ends: list[Side] = [self.server]

    def listen(self, *, key: bytes = KEY) -> Listener:
        """Listen."""
        wire = Wire(key, CODEC, self.loop)
        listener = Listener(HERE, self.port, wire, refused=self.server.refused.append)
        listener.open(self.server.opened)
        self.listeners.append(listener)
        return listener

    def call(self, *, key: bytes = KEY) -> tuple[Dialer, Side]:
        """Call."""
        end = Side()
        dialer = Dialer(HERE, self.port, Wire(key, CODEC, self.loop), opened=end.opened)
        dialer.begin()
        self.dialers.append(dialer)
        self.ends.append(end)
        return dialer, end

    def pair(self) -> tuple[Connection, Connection, Side]:
        """Return both ends of a connection: the caller's, the listener's, and who calls."""
        if not self.listeners:
            self.listen()
        before = len(self.server.connections)
        _, end = self.call()
        turn_until(self.loop, lambda: end.connections and len(self.server.connections) > before)
        return end.connections[0], self.server.connections[-1], end

    def works(self) -> None:
        """Assert that a launcher can still connect."""
        ours, _, _ = self.pair()
        ours.send(End(7))
        turn_until(self.loop, lambda: self.server.heard)
        assert self.server.heard.pop() == End(7)

    def look(self) -> None:
        """Turn the loop once, even if nothing happens."""
        self.loop.timer("look again", time.monotonic() + 0.01, lambda: None)
        self.loop.turn()

    def stranger(self) -> socket.socket:
        """Return a socket that is connected."""
        return socket.create_connection((HERE, self.port), 10)

    def close(self) -> None:
        """End everything."""
        for dialer in self.dialers:
            dialer.close()
        for listener in self.listeners:
            listener.close()
        for end in self.ends:
            for connection in end.connections:
                connection.close()


@pytest.fixture
def net(loop: Loop) -> Iterator[Net]:
    made = Net(loop)
    yield made
    made.close()


# Two launchers ------------------------------------------------------------------------------------


def test_a_message_of_many_pieces_arrives_whole(net: Net) -> None:
    ours, theirs, caller = net.pair()
    roster = Hello("all", ports=tuple(range(60_000)))
    theirs.send(roster)
    theirs.send(Hello("me"))
    turn_until(net.loop, lambda: len(caller.heard) == 2)
    assert caller.heard == [roster, Hello("me")]
    ours.send(roster)
    turn_until(net.loop, lambda: net.server.heard)
    assert net.server.heard == [roster]


def test_lines_count_once_in_their_order_and_direction() -> None:
    sent = [Seal(b"key", b"caller").put(b"1"), Seal(b"key", b"listener").put(b"1")]
    seal = Seal(b"key", b"caller")
    sent += [seal.put(b"0"), seal.put(b"2")]
    assert Seal(b"key", b"caller").take(sent[0]) == b"1"
    for wrong in (sent[1], sent[3], sent[0][:-1] + b"2"):
        with pytest.raises(Malformed):
            Seal(b"key", b"caller").take(wrong)


# Strangers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (job_key("job", "a"), job_key("job", "b")),
        (job_key("job", "a"), job_key("job")),
        (job_key("job"), job_key("other")),
    ],
)
def test_a_launcher_with_another_key_is_refused_and_told(
    net: Net, ours: bytes, theirs: bytes
) -> None:
    net.listen(key=ours)
    dialer, end = net.call(key=theirs)
    turn_until(net.loop, lambda: net.server.refused and dialer.trouble == STRANGER)
    assert STRANGER in net.server.refused[0]
    assert net.server.connections == end.connections == []


THOUSANDS = [1_000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.long])]


@pytest.mark.parametrize("number", THOUSANDS)
def test_thousands_of_lines_of_strangers_change_nothing(net: Net, number: int) -> None:
    listener = net.listen()
    net.works()
    draw = random.Random(13)
    greeting = b"0" * 32
    sent = 0
    while sent < number:
        with net.stranger() as call:
            for _ in range(draw.randrange(1, 4)):
                kind = draw.randrange(6)
                data = draw.randbytes(draw.randrange(300))
                if kind == 0:
                    data = data + b"\n"
                elif kind == 1:
                    changed = bytearray(greeting)
                    changed[draw.randrange(len(changed))] = draw.randrange(256)
                    data = bytes(changed) + b"\n"
                elif kind == 2:
                    data = (greeting + b"\n") + (data + b"\n")
                elif kind == 3:
                    data = b"[" * draw.randrange(600) + b"\n"
                elif kind == 4:
                    data = (greeting + b"\n")[: draw.randrange(20)]
                with suppress(OSError):
                    call.sendall(data)
                sent += 1
            if sent % 7 == 0:
                net.look()
        while listener.pending:
            net.look()
    assert len(net.server.connections) == 1
    assert net.server.lost == []
    assert len(net.server.refused) > number / 10
    net.works()


def test_who_says_nothing_loses_his_place_in_time(net: Net) -> None:
    listener = net.listen()
    listener.greeting_s = 0.05
    with net.stranger() as silent, net.stranger() as slow:
        slow.sendall(b"{}")
        turn_until(net.loop, lambda: len(net.server.refused) == 1 and not listener.pending)
        assert all(len(call.recv(999)) == 33 for call in (silent, slow))


def test_a_flood_of_idle_callers_drives_out_itself(net: Net) -> None:
    listener = net.listen()
    listener.most_pending = 8
    idle = [net.stranger() for _ in range(50)]
    net.works()
    assert len(listener.pending) <= 8
    assert not net.server.refused
    for call in idle:
        call.close()
