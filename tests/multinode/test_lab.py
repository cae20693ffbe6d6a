"""The hosts of the test bed are separate from each other, and from this machine."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from waiting import LONG_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab import Host, Network

pytestmark = pytest.mark.multinode

Pair = tuple["Host", "Host"]

SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 6070))
open("listening", "w").close()
connection, peer = server.accept()
connection.sendall(peer[0].encode())
"""
CALL = """
import socket, sys
print(socket.create_connection((sys.argv[1], 6070), 10).recv(100).decode())
"""


@pytest.mark.parametrize("way", ["there", "back"])
def test_hosts_reach_each_other(two_hosts: Pair, way: str) -> None:
    server, client = two_hosts if way == "there" else two_hosts[::-1]
    serving = server.start(sys.executable, "-c", SERVE)
    until((server.folder / "listening").exists)
    assert client.run(sys.executable, "-c", CALL, server.ip).stdout == f"{client.ip}\n"
    assert client.run(sys.executable, "-c", CALL, server.ip, check=False).returncode == 1
    assert serving.wait(LONG_S) == 0


PING = """
import socket, sys
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.bind(("0.0.0.0", 6071))
link.settimeout(0.5)
echoed = 0
for number in range(int(sys.argv[2])):
    link.sendto(b"%d" % number, (sys.argv[1], 6072))
    try:
        echoed += link.recv(100) == b"%d" % number
    except TimeoutError:
        pass
print(echoed)
"""
PONG = """
import socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.bind(("0.0.0.0", 6072))
open("listening", "w").close()
while True:
    link.sendto(*link.recvfrom(100))
"""


def pings(here: Host, there: Host, number: int = 3) -> int:
    """Return how many of NUMBER datagrams from HERE were echoed by THERE."""
    return int(here.run(sys.executable, "-c", PING, there.ip, str(number)).stdout)


@contextmanager
def pong(hosts: tuple[Host, ...]) -> Iterator[None]:
    """Let HOSTS answer pings."""
    answering = [host.start(sys.executable, "-c", PONG) for host in hosts]
    for host in hosts:
        until((host.folder / "listening").exists)
    yield
    for process in answering:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["four_hosts", "slow_hosts"])
def test_a_cable_can_be_cut_and_mended(kind: str, request: pytest.FixtureRequest) -> None:
    network: Network = request.getfixturevalue(kind)
    first, second, third, _ = network.hosts
    with pong(network.hosts):
        # An answer may be late on a busy machine.
        until(lambda: pings(first, second) == 3)
        network.cut(second)
        assert pings(first, second) == 0
        assert pings(second, third) == 0
        until(lambda: pings(first, third) == 3)
        network.heal(second)
        until(lambda: pings(first, second) == 3)
        until(lambda: pings(second, third) == 3)


def test_a_bad_network_loses_and_delays(slow_hosts: Network) -> None:
    first, second, *_ = slow_hosts.hosts
    with pong(slow_hosts.hosts):
        slow_hosts.spoil(loss=50)
        assert 0 < pings(first, second, 20) < 20
        slow_hosts.spoil(delay_ms=300)
        assert pings(first, second) == 0
        slow_hosts.spoil()
        until(lambda: pings(first, second) == 3)


def test_a_host_that_crashes_leaves_nothing(four_hosts: Network) -> None:
    first, second, *_ = four_hosts.hosts
    running = second.start("sleep", "500")
    until(lambda: second.processes() == ["sleep 500"])
    second.crash()
    assert running.wait(LONG_S) != 0
    assert first.run("true").returncode == 0
