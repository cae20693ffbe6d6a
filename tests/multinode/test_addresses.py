"""An interface of the user that cannot reach the other hosts is named before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from lab import ends
from waiting import TRAINING_S

if TYPE_CHECKING:
    from lab import Host

pytestmark = pytest.mark.multinode

Pair = tuple["Host", "Host"]


SUM_UP = """
import paddle, paddle.distributed as dist
dist.init_parallel_env()
x = paddle.to_tensor([float(10 ** dist.get_rank())])
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {x.item():g}", flush=True)
"""

# Where hosts would wait for each other, the test ends soon.
QUICK = "--rdzv_timeout=60"


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
