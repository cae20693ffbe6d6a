"""Findings about names, interfaces and ports: each one, and no others."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

import pytest
from findings import bad

from fleetrun.doctor import network
from fleetrun.doctor.findings import ERROR, OK, WARNING, Finding
from fleetrun.doctor.network import Interface

if TYPE_CHECKING:
    from pathlib import Path

LOOPBACK = Interface("lo", ("127.0.0.1",), is_up=True, speed_mbit=None, mtu=65536, is_loopback=True)
ETHERNET = Interface("eth0", ("10.0.0.1",), is_up=True, speed_mbit=25_000, mtu=9000)
DOCKER = Interface("docker0", ("172.17.0.1",), is_up=True, speed_mbit=None, mtu=1500)
INFINIBAND = Interface("ib0", ("10.1.0.1",), is_up=True, speed_mbit=None, mtu=4092)
HERE = (LOOPBACK, DOCKER, ETHERNET)


def judged(
    here: tuple[Interface, ...] = HERE,
    peer: str | None = "eth0",
    *,
    has_rdma: bool = True,
    has_peers: bool = True,
    is_nccl: bool = True,
    **env: str,
) -> Finding:
    return network.interface(
        here, peer, env, has_peers=has_peers, has_rdma=has_rdma, is_nccl=is_nccl
    )


def test_a_network_that_is_well_has_nothing_to_mend() -> None:
    names = network.host_names(("node1", "node2"), lambda _: ("10.0.0.1",))
    assert bad([*names, judged(), judged(peer=None, has_peers=False)]) == []


@pytest.mark.parametrize(
    ("name", "check", "level"),
    [("node1", "own name", WARNING), ("node2", "host name", ERROR)],
)
def test_a_name_that_does_not_resolve_is_a_finding(name: str, check: str, level: str) -> None:
    findings = network.host_names(("node1", "node2"), lambda it: () if it == name else ("::1",))
    assert bad(findings) == [(check, level)]


def test_a_resolver_that_hangs_or_fails_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str) -> tuple[str, ...]:
        if name == "hangs":
            select.select([], [], [])
        if name == "fails":
            raise OSError
        return ("10.0.0.1",)

    monkeypatch.setattr(network, "_SLOW_LOOKUP_S", 0.5)
    names = ("here", "fails", "hangs")
    well, failed, slow = network.host_names(names, resolve, timeout_s=0.5)
    assert well.level == OK
    assert failed.seen == "fails cannot be resolved"
    assert slow.seen == "resolving hangs takes 0.5 s or longer"
    assert bad([failed, slow]) == [("host name", ERROR), ("host name", WARNING)]


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth7"}, ERROR),
        ({"GLOO_SOCKET_IFNAME": "eth7", "is_nccl": False}, ERROR),
        ({"GLOO_SOCKET_IFNAME": "eth", "is_nccl": False}, ERROR),
        ({"here": (), "peer": None}, ERROR),
        ({"peer": "docker0"}, WARNING),
        ({"NCCL_SOCKET_IFNAME": "lo"}, WARNING),
        ({"GLOO_SOCKET_IFNAME": "lo", "is_nccl": False}, WARNING),
        ({"here": (ETHERNET._replace(speed_mbit=1000),), "has_rdma": False}, WARNING),
        ({"here": (ETHERNET._replace(name="wlan0"),), "NCCL_SOCKET_IFNAME": "wlan"}, WARNING),
    ],
)
def test_an_interface_that_is_not_well_is_a_finding(changed: dict[str, Any], level: str) -> None:
    assert bad([judged(**changed)]) == [("interface", level)]


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ({}, "the route to the other hosts is eth0 (10.0.0.1, 25 Gbit/s, MTU 9000)"),
        # Variables that only NCCL reads.
        ({"NCCL_SOCKET_IFNAME": "eth7"}, "the route to the other hosts is eth0 (10.0.0.1, 25"),
        ({"has_peers": False, "peer": None}, "eth0 (10.0.0.1, 25 Gbit/s, MTU 9000)"),
    ],
)
def test_nothing_is_said_of_nccl_where_nothing_uses_it(changed: dict[str, Any], seen: str) -> None:
    finding = judged(is_nccl=False, **changed)
    assert finding.level == OK
    assert finding.seen.startswith(seen)
    assert "NCCL" not in repr(finding)


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
    interface = network.taken(interfaces, peer, {"NCCL_SOCKET_IFNAME": asked}, is_nccl=True)
    assert (interface and interface.name) == taken


def test_the_loopback_of_this_host_is_known() -> None:
    (loopback,) = [interface for interface in network.interfaces() if interface.is_loopback]
    assert "127.0.0.1" in loopback.addresses


@pytest.mark.parametrize(("state", "levels"), [("1: DOWN", [WARNING]), ("4: ACTIVE", [])])
def test_every_rdma_port_has_its_state(tmp_path: Path, state: str, levels: list[str]) -> None:
    port = tmp_path / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    for is_nccl in (True, False):
        findings = list(network.rdma(str(tmp_path), is_nccl=is_nccl))
        assert len(findings) == 1
        assert bad(findings) == [("InfiniBand", level) for level in levels]
        assert is_nccl or "NCCL" not in repr(findings)


@pytest.mark.parametrize(
    ("wanted", "levels"),
    [
        ([(6070, ""), (6071, "")], []),
        ([], []),
        ([(6070, "pid 7 (python)"), (6071, "")], [ERROR]),
        ([(40000, "")], [WARNING]),
    ],
)
def test_ports_that_are_taken_or_exposed_are_findings(
    tmp_path: Path, wanted: list[tuple[int, str]], levels: list[str]
) -> None:
    findings = network.ports(wanted, has_peers=True, root=str(tmp_path))
    assert bad(findings) == [("port", level) for level in levels]
