"""Ports of ranks behind a firewall are named before the start, and in the report of a hang."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest
from lab import ends
from waiting import quick

if TYPE_CHECKING:
    import subprocess

    from lab import Host, Network

pytestmark = [
    pytest.mark.multinode,
    pytest.mark.skipif(not shutil.which("nft"), reason="there is no nft (Debian: nftables)"),
]

IPS = ("--ips=10.88.0.1,10.88.0.2",)
MASTER = ("--master=10.88.0.1:6170", "--nnodes=2", "--start_port=6070")
REMARK = "This host does not reach ports of other hosts' ranks: "
SILENT = "no answer within 1 s (is a firewall in between?)"
# The verdict of a firewall, and its effect on the other host.
ANSWERS = {
    "drop": SILENT,
    "reject with tcp reset": "connection refused",
    "reject with icmp type admin-prohibited": "no route to host",
}
# Listens at once on ports that were called before, as simple servers do; all end together.
LISTEN = """
import os, socket
host, _, port = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")
socket.socket().bind(("0.0.0.0", int(port)))
open("up." + os.environ["PADDLE_TRAINER_ID"], "w")
"""
# Waits for the first rank as Paddle's store does.
CONNECT = """
import os, socket, time
host, _, port = os.environ["PADDLE_MASTER"].rpartition(":")
if os.environ["PADDLE_TRAINER_ID"] == "0":
    server = socket.create_server(("0.0.0.0", int(port)))
    links = [server.accept() for _ in range(3)]
while True:
    link = socket.socket()
    link.settimeout(600)
    try:
        link.connect((host, int(port)))
        link.recv(1)
    except OSError:
        time.sleep(0.2)
"""


def block(host: Host, ports: str, what: str, *, of: str = "10.88.0.0/24") -> None:
    """Let the firewall of HOST do WHAT with connections from OF to PORTS."""
    host.filter(f"in ip saddr {of} tcp dport {ports} {what}")


def start(host: Host, script: str, *options: str) -> subprocess.Popen[bytes]:
    """Start a launcher with two ranks of SCRIPT on HOST."""
    (host.folder / "train.py").write_text(script)
    return host.fleetrun("--nproc_per_node=2", *options, "train.py")


def run(hosts: tuple[Host, ...], script: str, *options: str) -> list[str]:
    """Run a job of SCRIPT on HOSTS, which succeeds; return the output of each launcher."""
    launchers = [start(host, script, *options) for host in hosts]
    assert ends(launchers) == [0] * len(hosts), [host.output for host in hosts]
    assert not [line for host in hosts for line in host.processes()]
    return [host.output for host in hosts]


@pytest.mark.parametrize("where", [IPS, MASTER])
def test_where_all_are_reached_nothing_is_said_and_ranks_have_their_ports(
    where: tuple[str, ...], two_hosts: tuple[Host, Host]
) -> None:
    for text in run(two_hosts, LISTEN, *where):
        assert "reach" not in text
    assert len([file for host in two_hosts for file in host.folder.glob("up.*")]) == 4


@pytest.mark.parametrize("what", ANSWERS)
@pytest.mark.parametrize("where", [IPS, MASTER])
def test_ports_that_are_blocked_are_named_and_the_job_starts(
    where: tuple[str, ...], what: str, two_hosts: tuple[Host, Host]
) -> None:
    block(two_hosts[0], "6070-6071", what)
    well, ill = run(two_hosts, LISTEN, *where)
    assert REMARK not in well
    assert f"{REMARK}10.88.0.1:6070, 6071: {ANSWERS[what]}." in ill


def test_each_host_tries_the_first_one_and_its_neighbours(four_hosts: Network) -> None:
    first, second, third, fourth = four_hosts.hosts
    block(first, "6071", "drop", of=fourth.ip)
    block(second, "6070", "drop", of=third.ip)
    block(fourth, "6070-6071", "drop")
    ips = f"--ips={','.join(host.ip for host in four_hosts.hosts)}"
    texts = run(four_hosts.hosts, LISTEN, ips)
    remarks = [re.findall(rf"{re.escape(REMARK)}(.*?) The job", text) for text in texts]
    assert [of_host[0] if of_host else "" for of_host in remarks] == [
        f"10.88.0.4:6070, 6071: {SILENT}.",
        f"10.88.0.4:6070, 6071: {SILENT}.",
        f"10.88.0.4:6070, 6071: {SILENT}; 10.88.0.2:6070: {SILENT}.",
        f"10.88.0.1:6071: {SILENT}.",
    ]


@pytest.mark.parametrize("what", ["drop", "reject with tcp reset"])
def test_the_report_of_a_hang_names_what_a_rank_does_not_reach(
    what: str, two_hosts: tuple[Host, Host]
) -> None:
    first, second = two_hosts
    block(first, "6070", what, of=second.ip)
    launchers = [start(host, CONNECT, *IPS, *quick(), "--hang_timeout=3") for host in two_hosts]
    assert ends(launchers) == [124, 124], [host.output for host in two_hosts]
    report = first.output
    assert f"Before the start 10.88.0.2 did not reach 10.88.0.1:6070 ({ANSWERS[what]})." in report
    if what == "drop":
        for rank in (2, 3):
            assert f"Rank {rank} does not reach 10.88.0.1:6070." in report
        assert "rank 2 does not reach 10.88.0.1:6070" in second.output
    assert not [line for host in two_hosts for line in host.processes()]
