"""Check-ups of several hosts meet on the ports of the job; hosts here are loopback addresses."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import ports

from fleetrun.model import Member
from fleetrun.session.introductions import Connect, HostDescription, Peer, PeerCheck
from fleetrun.session.wire import Key

CARD = HostDescription("node", "0.1.0", "3.11", "3.3.1", "", "", "")


def two_on_loopback() -> list[Member]:
    """Return two hosts that have the same free port."""
    numbers = ports.free(1)
    return [Member(f"127.0.0.{last}", numbers, ()) for last in (2, 3)]


def alone(hosts: list[Member], timeout_s: float) -> tuple[Peer, ...]:
    """Let the first of HOSTS meet the others."""
    return PeerCheck(hosts, 0, CARD, key=Key("job"), timeout_s=timeout_s).run(hosts[0].host)


def test_a_host_that_does_not_come_refuses() -> None:
    hosts = two_on_loopback()
    (peer,) = alone(hosts, 0.3)
    assert peer == Peer("127.0.0.3", (Connect(hosts[1].ports[0], "refused", "connection refused"),))


def test_what_answers_otherwise_is_another_program() -> None:
    hosts = two_on_loopback()
    with socket.create_server((hosts[1].host, *hosts[1].ports)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(100)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        (peer,) = alone(hosts, 2.0)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    (connect,) = peer.connects
    assert (connect.outcome, peer.card) == ("another program", None)
    assert "'HTTP/1.1 400 Bad Request'" in connect.text
