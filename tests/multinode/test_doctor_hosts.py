"""`fleetrun doctor` on two hosts at once tries the job's ports, and detects a firewall."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lab import Host, ends
from waiting import LONG_S

pytestmark = pytest.mark.multinode

Pair = tuple[Host, Host]
Findings = list[dict[str, Any]]

IPS = "--ips=10.88.0.1,10.88.0.2"


def doctors(hosts: Pair, *words: str) -> list[Findings]:
    """Run the doctor on both of HOSTS; return the findings of each."""
    ends([host.fleetrun("doctor", "--json", IPS, *words) for host in hosts], LONG_S)
    for host in hosts:
        assert host.processes() == []
    return [json.loads(host.output)["findings"] for host in hosts]


def of(findings: Findings, check: str) -> list[tuple[str, str]]:
    return [
        (finding["level"], finding["seen"]) for finding in findings if finding["check"] == check
    ]


def test_hosts_meet_on_every_port_of_the_job(two_hosts: Pair) -> None:
    findings = doctors(two_hosts, "--nproc_per_node=2", f"--wait={LONG_S:g}")
    for mine, other in zip(findings, ("10.88.0.2", "10.88.0.1"), strict=True):
        assert of(mine, "connection") == [("ok", f"{other} answers on 2 of 2 ports")]
        ((_, taken),) = of(mine, "interface")
        assert taken.startswith("ranks use eth0 (")


def test_a_port_behind_a_firewall_is_an_error_where_it_is_wanted(two_hosts: Pair) -> None:
    # The second host's answers from that port are dropped on their way. TCP is 6: a bare machine
    # has no /etc/protocols.
    two_hosts[1].run("ip", "rule", "add", "ipproto", "6", "sport", "6071", "blackhole")
    first, second = doctors(two_hosts, "--nproc_per_node=2", "--wait=3")
    ((level, text),) = of(first, "connection")
    assert (level, text) == (
        "error",
        "10.88.0.2:6071: no answer within 1 s (is a firewall in between?)",
    )
    assert of(second, "connection") == [("ok", "10.88.0.1 answers on 2 of 2 ports")]


def test_a_host_without_a_doctor_is_told_from_one_that_is_down(two_hosts: Pair) -> None:
    first, _ = two_hosts
    words = ("doctor", "--json", "--nproc_per_node=1", "--wait=1")
    for ips, level in (("10.88.0.1,10.88.0.2", "warning"), ("10.88.0.1,10.88.0.9", "error")):
        first.fleetrun(*words, f"--ips={ips}").wait(LONG_S)
        ((judged, _),) = of(json.loads(first.output)["findings"], "connection")
        assert judged == level
