"""Findings about names, interfaces, ports and other hosts: each one, and no others."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
from findings import bad
from plans import a_request, a_roster, some_facts

from fleetrun.doctor import network, peers
from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import ERROR, WARNING, Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1"}
OWN = os.uname().nodename


def a_job(
    *hosts: str, kind: str = "gpu", peer: str | None = "eth0", request: Any = None, **env: str
) -> CheckedJob:
    return CheckedJob(
        request or a_request(),
        env,
        facts=some_facts(peer_interface=peer),
        roster=a_roster(hosts or ("10.0.0.1", "10.0.0.2")),
        kind=kind,
    )


def judged(here: Mapping[str, str] = HERE, *hosts: str, **fields: Any) -> Finding:
    (finding,) = network.interface(a_job(*hosts, **fields), here)
    return finding


@pytest.mark.parametrize(
    ("unknown", "findings"),
    [("", []), (OWN, [("own name", WARNING)]), ("node2", [("host name", ERROR)])],
)
def test_a_name_that_does_not_resolve_is_a_finding(
    unknown: str, findings: list[tuple[str, str]]
) -> None:
    job = a_job(OWN, "node2", "10.0.0.3")
    names = list(network.host_names(job, lambda it: () if it == unknown else ("::1",)))
    assert len(names) == 2
    assert bad(names) == findings


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth7"}, ERROR),
        ({"GLOO_SOCKET_IFNAME": "eth7", "kind": "cpu"}, ERROR),
        ({"GLOO_SOCKET_IFNAME": "eth", "kind": "cpu"}, ERROR),
        ({"here": {}, "peer": None}, ERROR),
        ({"peer": "docker0"}, WARNING),
        ({"NCCL_SOCKET_IFNAME": "lo"}, WARNING),
        ({"GLOO_SOCKET_IFNAME": "lo", "kind": "cpu"}, WARNING),
    ],
)
def test_an_interface_that_is_not_well_is_a_finding(changed: dict[str, Any], level: str) -> None:
    assert bad([judged(**changed)]) == [("interface", level)]


def test_ports_that_are_taken_are_findings() -> None:
    job = a_job("127.0.0.2", "127.0.0.3")
    assert bad(network.ports(job)) == []
    with socket.create_server(("127.0.0.2", 6071)):
        findings = list(network.ports(job))
    assert bad(findings) == [("port", ERROR)]
    assert f"6071 is taken by pid {os.getpid()}" in findings[0].seen
    # One host asks the kernel for free ones.
    assert list(network.ports(a_job("127.0.0.2"))) == []


# -- the other hosts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "findings"),
    [
        ("", []),
        ("no answer within 1 s", [("connection", ERROR)]),
        (peers.REFUSED, [("connection", WARNING)]),
    ],
)
def test_a_port_that_cannot_be_connected_to_is_a_finding(
    why: str, findings: list[tuple[str, str]]
) -> None:
    (host,) = a_roster(["node2"]).members
    outcomes = {("node2", 6070): "", ("node2", 6071): why}
    assert bad(peers.judge([host], outcomes)) == findings
