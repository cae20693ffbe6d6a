"""Findings about names, interfaces and ports: each one, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from findings import bad

from fleetrun.doctor import network
from fleetrun.doctor.findings import ERROR, OK, WARNING, Finding
from fleetrun.doctor.network import Interface, NameLookup, Network, RdmaPort

LOOPBACK = Interface("lo", ("127.0.0.1",), is_up=True, speed_mbit=None, mtu=65536, is_loopback=True)
ETHERNET = Interface("eth0", ("10.0.0.1",), is_up=True, speed_mbit=25_000, mtu=9000)
DOCKER = Interface("docker0", ("172.17.0.1",), is_up=True, speed_mbit=None, mtu=1500)
INFINIBAND = Interface("ib0", ("10.1.0.1",), is_up=True, speed_mbit=None, mtu=4092)
WELL = Network(
    hostname="node1",
    interfaces=(LOOPBACK, DOCKER, ETHERNET),
    lookups=(NameLookup("node1", ("10.0.0.1",), 0.001), NameLookup("node2", ("10.0.0.2",), 0.001)),
    rdma=(RdmaPort("mlx5_0", "1", "4: ACTIVE", "400 Gb/sec (4X NDR)"),),
    asked_interface="",
    peer_interface="eth0",
    ports=((6070, ""), (6071, "")),
    ephemeral=(32768, 60999),
    has_peers=True,
)


def judged(facts: Network, *, uses_nccl: bool = True) -> list[Finding]:
    return list(network.judge(facts, uses_nccl=uses_nccl))


def test_a_network_that_is_well_has_nothing_to_mend() -> None:
    assert bad(judged(WELL)) == []
    assert bad(judged(WELL._replace(has_peers=False, peer_interface=None, ports=()))) == []


@pytest.mark.parametrize(
    ("changed", "check", "level"),
    [
        ({"lookups": (NameLookup("node1", (), 0.0),)}, "own name", WARNING),
        ({"lookups": (WELL.lookups[0], NameLookup("node2", (), 0.0))}, "host name", ERROR),
        ({"lookups": (WELL.lookups[0], NameLookup("node2", (), 6.0))}, "host name", WARNING),
        ({"lookups": (NameLookup("node1", ("10.0.0.1",), 5.0),)}, "host name", WARNING),
        ({"asked_interface": "eth7"}, "interface", ERROR),
        ({"interfaces": (), "peer_interface": None}, "interface", ERROR),
        ({"peer_interface": "docker0"}, "interface", WARNING),
        ({"asked_interface": "lo"}, "interface", WARNING),
        (
            {"interfaces": (ETHERNET._replace(speed_mbit=1000),), "rdma": ()},
            "interface",
            WARNING,
        ),
        (
            {"interfaces": (ETHERNET._replace(name="wlan0"),), "asked_interface": "wlan"},
            "interface",
            WARNING,
        ),
        ({"rdma": (RdmaPort("mlx5_0", "1", "1: DOWN", ""),)}, "InfiniBand", WARNING),
        ({"ports": ((6070, "pid 7 (python)"), (6071, ""))}, "port", ERROR),
        ({"ports": ((40000, ""),)}, "port", WARNING),
    ],
)
def test_what_is_not_well_is_the_one_finding(
    changed: dict[str, Any], check: str, level: str
) -> None:
    assert bad(judged(WELL._replace(**changed))) == [(check, level)]


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ({}, "the route to the other hosts is eth0 (10.0.0.1, 25 Gbit/s, MTU 9000)"),
        # Variables that only NCCL reads.
        ({"asked_interface": "eth7"}, "the route to the other hosts is eth0 (10.0.0.1, 25"),
        ({"has_peers": False, "peer_interface": None}, "eth0 (10.0.0.1, 25 Gbit/s, MTU 9000)"),
    ],
)
def test_nothing_is_said_of_nccl_where_nothing_uses_it(changed: dict[str, Any], seen: str) -> None:
    findings = judged(WELL._replace(**changed), uses_nccl=False)
    (interface,) = [finding for finding in findings if finding.check == "interface"]
    assert interface.level == OK
    assert interface.seen.startswith(seen)
    assert "NCCL" not in repr(findings)
    down = RdmaPort("mlx5_0", "1", "1: DOWN", "")
    assert "NCCL" not in repr(judged(WELL._replace(rdma=(down,)), uses_nccl=False))


@pytest.mark.parametrize(
    ("asked", "peer", "interfaces", "taken"),
    [
        ("", None, (LOOPBACK, DOCKER, ETHERNET), "eth0"),
        ("", None, (LOOPBACK, ETHERNET, INFINIBAND), "ib0"),
        ("", None, (LOOPBACK, DOCKER), "docker0"),
        ("", None, (LOOPBACK,), "lo"),
        ("", None, (ETHERNET._replace(is_up=False), LOOPBACK), "lo"),
        ("", "docker0", (DOCKER, ETHERNET), "docker0"),
        ("eth", None, (INFINIBAND, ETHERNET), "eth0"),
        ("=eth", None, (INFINIBAND, ETHERNET), None),
        ("=eth0", "docker0", (INFINIBAND, ETHERNET), "eth0"),
        ("^lo,docker", None, (LOOPBACK, DOCKER, ETHERNET), "eth0"),
        ("ib1,eth0", None, (INFINIBAND, ETHERNET), "eth0"),
    ],
)
def test_the_interface_is_the_one_that_nccl_takes(
    asked: str, peer: str | None, interfaces: tuple[Interface, ...], taken: str | None
) -> None:
    interface = network.nccl_interface(
        WELL._replace(asked_interface=asked, peer_interface=peer, interfaces=interfaces)
    )
    assert (interface and interface.name) == taken
