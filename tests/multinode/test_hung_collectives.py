"""Ranks of two hosts wait for one of them: all records together name it, and its collective."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from lab import ends
from training import launch_on
from waiting import TRAINING_S, until

from fleetrun.rundir import eventfile, flightfile, names

if TYPE_CHECKING:
    from lab import Host

pytestmark = pytest.mark.multinode

LATE = """
import time
import paddle, paddle.distributed as dist
paddle.set_device("cpu")
dist.init_parallel_env()
def next_batch():
    time.sleep(600)
for step in range(3):
    if (dist.get_rank(), step) == (1, 2):
        next_batch()
    dist.all_reduce(paddle.ones([4]))
"""
BUSY = """
import time
import paddle, paddle.distributed as dist
paddle.set_device("cpu")
dist.init_parallel_env()
while True:
    dist.all_reduce(paddle.ones([4]))
    open("trains", "w").close()
    time.sleep(0.01)
"""
DESYNC = """
import paddle, paddle.distributed as dist
paddle.set_device("cpu")
dist.init_parallel_env()
dist.all_reduce(paddle.ones([4]))
dist.all_reduce(paddle.ones([5 if dist.get_rank() == 1 else 4]))
dist.barrier()
"""


@pytest.mark.skipif(not shutil.which("nft"), reason="there is no nft (Debian: nftables)")
def test_of_a_dead_network_no_rank_is_named(two_hosts: tuple[Host, Host]) -> None:
    for host in two_hosts:
        (host.folder / "job.py").write_text(BUSY)
    # Launchers reach each other, ranks do not.
    options = "--master=10.88.0.1:6000", "--nnodes=2", "--nproc_per_node=1", "--hang_timeout=8"
    launchers = [launch_on(host, *options, "job.py") for host in two_hosts]
    until(lambda: all((host.folder / "trains").exists() for host in two_hosts), TRAINING_S)
    two_hosts[1].filter("in tcp sport 6000 accept", "in ip saddr 10.88.0.1 drop")
    assert ends(launchers, TRAINING_S) == [124, 124]
    run = two_hosts[0].folder / "log" / "latest"
    (hung,) = [event for event in eventfile.read(str(run / names.EVENTS)) if event.event == "hung"]
    (finding,) = hung.more["collectives"]
    assert finding["who"] == []
    assert finding["text"].startswith("all its ranks have entered all_reduce ")
    assert finding["text"].endswith("no rank is missing, so the network or a device holds it up")


@pytest.mark.parametrize(
    ("script", "who", "text"),
    [
        pytest.param(
            *(LATE, "rank 1", "rank 1 never entered all_reduce 3 of all ranks; rank 0 waits"),
            id="late",
        ),
        pytest.param(
            *(DESYNC, "rank 1", "rank 1 called all_reduce of float32 [5] in job.py:6 where rank"),
            id="desync",
            # On one host train/test_hung_training.py has such ranks.
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_records_of_two_hosts_say_who_keeps_the_others_waiting(
    two_hosts: tuple[Host, Host], script: str, who: str, text: str
) -> None:
    for host in two_hosts:
        (host.folder / "job.py").write_text(script)
    options = "--ips=10.88.0.1,10.88.0.2", "--nproc_per_node=1", "--hang_timeout=8"
    launchers = [launch_on(host, *options, "job.py") for host in two_hosts]
    assert ends(launchers, TRAINING_S) == [124, 124]
    run = two_hosts[0].folder / "log" / "latest"
    (hung,) = [event for event in eventfile.read(str(run / names.EVENTS)) if event.event == "hung"]
    (finding,) = hung.more["collectives"]
    assert finding["who"] == [who]
    assert finding["text"].startswith(text)
    assert two_hosts[1].output.count(text[1:]) == 1
    # It has the records of its own rank, and of the other host's.
    for rank in range(2):
        assert flightfile.read(str(run / names.collectives(str(rank))), 0) is not None
