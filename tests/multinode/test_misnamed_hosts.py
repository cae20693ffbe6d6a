"""Hosts that are named such that they cannot meet: each host is told what is wrong, and at once."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from lab import ends

if TYPE_CHECKING:
    from lab import Host

pytestmark = pytest.mark.multinode

Pair = tuple["Host", "Host"]
Words = tuple[str, ...]

# Where hosts would wait for each other, the test ends soon.
QUICK = "--rdzv_timeout=60"
JOB = ("--nproc_per_node=1", "job.py")
MEETING = ("--nnodes=2", "--master=10.88.0.1:8090")
BY_NAME = ("--nnodes=2", "--master=head:8090")
LISTED = ("--ips=10.88.0.1,10.88.0.2",)
FIRST = "--host=10.88.0.1"

PRINT = """
import os
print("endpoints", os.environ["PADDLE_TRAINER_ENDPOINTS"], flush=True)
"""


@pytest.fixture
def six(two_hosts: Pair) -> Pair:
    """Two hosts that also have IPv6, and names for these addresses alone."""
    for place, host in enumerate(two_hosts, 1):
        host.run("ip", "addr", "add", f"fd00::{place}/64", "dev", "eth0", "nodad")
        with (host.folder / "hosts").open("a") as file:
            file.write("fd00::1 head\nfd00::2 tail\n")
    return two_hosts


def start(hosts: Pair, *words: Words) -> list[subprocess.Popen[bytes]]:
    """Start a launch on each of HOSTS; the second one's options may differ."""
    for host in hosts:
        (host.folder / "job.py").write_text(PRINT)
    return [
        host.fleetrun(*own, *JOB) for host, own in zip(hosts, (words[0], words[-1]), strict=True)
    ]


@pytest.mark.parametrize(
    "words",
    [(*BY_NAME, QUICK), ("--ips=head,tail", QUICK)],
    ids=["master", "ips"],
)
def test_names_of_ipv6_alone_are_refused_at_once(six: Pair, words: Words) -> None:
    assert ends(start(six, words)) == [2, 2]
    for host in six:
        assert "head" in host.output
        assert "Paddle reads no IPv6" in host.output


def test_a_listed_host_with_another_ones_address_is_told(two_hosts: Pair) -> None:
    codes = ends(start(two_hosts, (*LISTED, FIRST, QUICK)))
    assert 0 not in codes
    assert 4 not in codes, "nobody waits to the end"
    output = two_hosts[1].output
    assert f"fleetrun: {FIRST}" in output, output
    assert two_hosts[1].ip in output


def test_two_hosts_with_one_address_do_not_meet(two_hosts: Pair) -> None:
    assert ends(start(two_hosts, (*MEETING, FIRST, QUICK))) == [4, 4]
    for host in two_hosts:
        assert "has the address 10.88.0.1, too: give each host its own --host" in host.output
