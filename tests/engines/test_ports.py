"""Ports that no two launches share, and ports that are requested by number."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import until

from fleetrun.engines.ports import Ports
from fleetrun.errors import EnvironmentFault
from fleetrun.host import tcp
from fleetrun.run.isolation import IsolatedCall
from fleetrun.run.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

RESERVER = """
import sys
from fleetrun.engines.ports import Ports
held = Ports(int(sys.argv[1]))
print(*held.free(40), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Hold ports for the length of a test."""
    held = Ports(os.getpid())
    yield held
    held.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listen on a loopback port, as another program's server does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def port_of(server: socket.socket) -> int:
    """Return the port of SERVER."""
    port: int = server.getsockname()[1]
    return port


@pytest.mark.extended
def test_many_launches_at_once_share_no_port() -> None:
    # The same pid for all: in containers that share a network it can be so.
    launches = [
        subprocess.Popen(
            [sys.executable, "-c", RESERVER, "4711"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for _ in range(12)
    ]
    lines = [launch.stdout.readline() for launch in launches if launch.stdout]
    ports = [port for line in lines for port in line.split()]
    assert len(ports) == len(set(ports)) == 12 * 40
    for launch in launches:
        launch.communicate()
    assert [launch.returncode for launch in launches] == [0] * 12


def test_ports_are_free_again_when_their_owner_dies() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RESERVER, "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as launch:
        assert launch.stdout is not None
        port = int(launch.stdout.readline().split()[0])
        ports = Ports(1)
        with pytest.raises(EnvironmentFault, match=rf"Port {port} is taken by pid {launch.pid} "):
            ports.take((port,))
        launch.kill()
        launch.wait()
        until(lambda: tcp.holder(port) is None)
        ports.take((port,))
        ports.close()


def test_a_taken_port_is_refused_with_its_holder(ports: Ports, listener: socket.socket) -> None:
    port = port_of(listener)
    with pytest.raises(EnvironmentFault) as caught:
        ports.take((port,))
    message = str(caught.value)
    assert message.startswith(f"Port {port} is taken by pid {os.getpid()} (")
    assert message.endswith("give another --start_port (the same on every host).")


def test_a_connection_of_the_last_run_that_lingers_does_not_matter(ports: Ports) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = port_of(server)
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            # The end that closes first keeps the port in TIME_WAIT.
            accepted.close()
            assert client.recv(1) == b""
    ports.take((port,))


def test_ports_are_free_at_once_whatever_a_child_is_asked_meanwhile(ports: Ports) -> None:
    # A restart takes the ports of the last attempt, while git may still be asked in a child.
    (port,) = ports.free(1)
    loop = Loop()
    abandon = IsolatedCall(partial(time.sleep, 60)).watch(loop, lambda _: None)
    ports.close()
    ports.take((port,))
    abandon()
    loop.close()


def test_two_hosts_on_loopback_may_have_the_same_ports(ports: Ports) -> None:
    (port,) = ports.free(1)
    ports.close()
    other = Ports(1)
    ports.take((port,), "127.0.0.1")
    other.take((port,), "127.0.0.2")
    with pytest.raises(EnvironmentFault, match="is taken"):
        Ports(2).take((port,), "127.0.0.2")
    other.close()
