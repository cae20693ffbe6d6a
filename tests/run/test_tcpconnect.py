"""One attempt to connect: what it reaches, and the errors of what it does not."""

from __future__ import annotations

import _socket
import errno
import socket
from typing import TYPE_CHECKING

import ports
from wire import turn_until

from fleetrun.run import tcpconnect
from fleetrun.run.loop import Loop

if TYPE_CHECKING:
    import pytest

    from fleetrun.run.tcpconnect import Link

HERE = "127.0.0.1"


def connected(port: int, within_s: float = 60.0) -> tuple[Link | None, int]:
    """Return the result of an attempt to connect to PORT."""
    loop = Loop()
    results: list[tuple[Link | None, int]] = []
    (place,) = tcpconnect.literal(HERE, port)
    tcpconnect.TcpConnect(place, loop, lambda *words: results.append(words), within_s)
    assert not results
    turn_until(loop, lambda: results)
    loop.close()
    return results[0]


def test_who_listens_is_reached_at_its_address() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        link, _ = connected(port)
        assert link is not None
        assert link.address == HERE
        link.socket.close()


def test_who_does_not_listen_refuses() -> None:
    assert connected(ports.free(1)[0]) == (None, errno.ECONNREFUSED)


def test_who_does_not_answer_is_given_up() -> None:
    with socket.create_server((HERE, 0), backlog=0) as server:
        where = server.getsockname()
        # The kernel drops connections beyond the backlog.
        first = socket.create_connection(where)
        assert connected(where[1], 0.05) == (None, errno.ETIMEDOUT)
        first.close()


def test_who_was_given_the_port_that_it_calls_has_reached_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = ports.free(1)[0]

    class Bound(_socket.socket):
        """A socket with this local port, as the kernel may choose it."""

        def __init__(self, family: int, kind: int) -> None:
            super().__init__(family, kind)
            self.bind((HERE, port))

    monkeypatch.setattr(_socket, "socket", Bound)
    assert connected(port) == (None, errno.ECONNREFUSED)
