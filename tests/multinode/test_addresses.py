"""Hosts whose addresses are on `lo`: ranks take the interface that leads to the others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from lab import ends
from waiting import TRAINING_S

if TYPE_CHECKING:
    from lab import Host

pytestmark = pytest.mark.multinode

Pair = tuple["Host", "Host"]

DUMP = """
import json, os
with open(f"rank-{os.environ['PADDLE_TRAINER_ID']}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""

SUM_UP = """
import paddle, paddle.distributed as dist
dist.init_parallel_env()
x = paddle.to_tensor([float(10 ** dist.get_rank())])
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {x.item():g}", flush=True)
"""

MEETING = ("--nnodes=2", "--master=10.99.0.1:8090")
# Where hosts would wait for each other, the test ends soon.
QUICK = "--rdzv_timeout=60"

OWN = ("--host=10.99.0.1", "--host=10.99.0.2")


@pytest.fixture
def announced(two_hosts: Pair) -> Pair:
    """Two hosts with an address on `lo` each, as a routing daemon announces it."""
    for own, other, host in ((1, 2, two_hosts[0]), (2, 1, two_hosts[1])):
        # A label, as administrators give it, is no interface.
        label = ("label", "lo:1")
        host.run("ip", "addr", "add", f"10.99.0.{own}/32", "dev", "lo", *label)
        via = ("via", f"10.88.0.{other}", "dev", "eth0", "src", f"10.99.0.{own}")
        host.run("ip", "route", "add", f"10.99.0.{other}/32", *via)
    return two_hosts


@pytest.mark.parametrize("source", [True, False], ids=["src", "no-src"])
@pytest.mark.parametrize(
    "words",
    [
        [("--ips=10.99.0.1,10.99.0.2",)] * 2,
        [MEETING] * 2,
        [(*MEETING, own) for own in OWN],
        [(*MEETING, "--network=10.99.0.0/24")] * 2,
    ],
    ids=["ips", "master", "host", "network"],
)
def test_ranks_of_addresses_on_lo_take_the_interface_to_the_others(
    announced: Pair, words: list[tuple[str, ...]], *, source: bool
) -> None:
    if not source:
        # Then the kernel calls from the address of eth0, which is not listed.
        for other, host in ((2, announced[0]), (1, announced[1])):
            via = ("via", f"10.88.0.{other}", "dev", "eth0")
            host.run("ip", "route", "replace", f"10.99.0.{other}/32", *via)
    for host in announced:
        (host.folder / "job.py").write_text(DUMP)
    launchers = [
        host.fleetrun(*own, QUICK, "--nproc_per_node=1", "job.py")
        for host, own in zip(announced, words, strict=True)
    ]
    assert ends(launchers) == [0, 0], "\n".join(host.output for host in announced)
    for path in (*announced[0].folder.glob("rank-*"), *announced[1].folder.glob("rank-*")):
        env = json.loads(path.read_text())
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert "127.0.0.1" not in env["PADDLE_TRAINER_ENDPOINTS"]


@pytest.mark.train
def test_loopback_as_the_interface_of_several_hosts_is_named_before_and_after(
    two_hosts: Pair,
) -> None:
    for host in two_hosts:
        (host.folder / "job.py").write_text(SUM_UP)
    words = ("--nnodes=2", "--master=10.88.0.1:8090", QUICK, "--nproc_per_node=1", "job.py")
    launchers = [host.fleetrun(*words, GLOO_SOCKET_IFNAME="lo") for host in two_hosts]
    assert 0 not in ends(launchers, TRAINING_S)
    for host in two_hosts:
        start, _, rest = host.output.partition("Successfully connected")
        for part in (start, rest):
            assert "GLOO_SOCKET_IFNAME=lo" in part, host.output
            assert "no other host comes by the loopback" in part, host.output
