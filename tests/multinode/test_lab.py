"""The hosts of the test bed are separate from each other, and from this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import lab
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


def test_hosts_have_their_own_name_address_and_processes(two_hosts: Pair) -> None:
    for host in two_hosts:
        assert host.run("hostname").stdout == f"{host.name}\n"
        addresses = host.run("ip", "-o", "-4", "addr").stdout
        assert host.ip in addresses
        assert addresses.count("\n") == 2, "lo and eth0 are all it has"
        assert host.run("ls", "/sys/class/net").stdout.split() == ["eth0", "lo"]
        assert host.run("getent", "hosts", host.name).stdout.startswith("127.0.1.1")
        assert host.processes() == []
    assert os.uname().nodename not in {host.name for host in two_hosts}


@pytest.mark.parametrize("way", ["there", "back"])
def test_hosts_reach_each_other(two_hosts: Pair, way: str) -> None:
    server, client = two_hosts if way == "there" else two_hosts[::-1]
    serving = server.start(sys.executable, "-c", SERVE)
    until((server.folder / "listening").exists)
    assert client.run(sys.executable, "-c", CALL, server.ip).stdout == f"{client.ip}\n"
    assert client.run(sys.executable, "-c", CALL, server.ip, check=False).returncode == 1
    assert serving.wait(LONG_S) == 0


def test_hosts_can_use_the_same_port(two_hosts: Pair) -> None:
    servers = [host.start(sys.executable, "-c", SERVE) for host in two_hosts]
    for host in two_hosts:
        until((host.folder / "listening").exists)
    for host in two_hosts:
        assert host.run(sys.executable, "-c", CALL, host.ip).stdout == f"{host.ip}\n"
    assert [server.wait(LONG_S) for server in servers] == [0, 0]


def test_labs_can_stand_side_by_side(two_hosts: Pair, tmp_path: Path) -> None:
    with lab.hosts(2, tmp_path / "other") as others:
        assert [host.ip for host in others] == [host.ip for host in two_hosts]
        others[0].run("ip", "link", "set", "eth0", "down")
        test_hosts_reach_each_other(two_hosts, "there")


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


def test_nothing_is_left_of_a_lab(tmp_path: Path) -> None:
    if not lab.is_root() or lab.missing():
        pytest.skip("no hosts can be made here")
    before = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout

    started: list[subprocess.Popen[bytes]] = []

    def fail_inside() -> None:
        with lab.hosts(2, tmp_path) as (host, _):
            started.append(host.start("sleep", "500"))
            until(lambda: host.processes() == ["sleep 500"])
            assert started[0].poll() is None
            during = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True)
            assert during.stdout == before
            raise KeyError(f"{host.pid}")

    with pytest.raises(KeyError) as caught:
        fail_inside()
    assert started[0].wait(LONG_S) != 0
    until(lambda: not Path(f"/proc/{caught.value.args[0]}").exists())
    after = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert after == before


def test_a_lab_dies_with_the_test_run(tmp_path: Path) -> None:
    if not lab.is_root() or lab.missing():
        pytest.skip("no hosts can be made here")
    code = (
        "import os, pathlib, sys, time, lab\n"
        "with lab.hosts(1, pathlib.Path(sys.argv[1])) as (host,):\n"
        "    print(host.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(lab.__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        run.send_signal(signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists())
