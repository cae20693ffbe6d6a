"""Fleet's groups of four ranks over gloo, which always connect; and the job's store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, mostly, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# Without fleetrun, four ranks hardly ever get through `fleet.init`.
SCRIPT = """
import paddle
from paddle.distributed import fleet
fleet.init(is_collective=True)
group = paddle.distributed.new_group([1, 3])
rank = fleet.worker_index()
net = paddle.nn.Linear(2, 1)
model = fleet.distributed_model(net)
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(parameters=net.parameters()))
model(paddle.full([1, 2], float(rank))).sum().backward()
optimizer.step()
told = paddle.to_tensor([rank])
if rank in group.ranks:
    paddle.distributed.all_reduce(told, group=group)
print("rank", rank, "sum", told.item(), "gradient", net.weight.grad.tolist())
"""


@pytest.mark.parametrize("version", mostly("3.3.1"))
def test_fleet_connects_four_ranks_over_gloo(version: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = ["-m", "fleetrun", "--nproc_per_node=4", "train.py"]
    done = run(PYTHONS[version], argv, tmp_path)
    assert done.returncode == 0, done.stdout
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(4)]
    for rank, told in enumerate((0, 4, 2, 4)):
        assert f"rank {rank} sum {told} gradient [[1.5], [1.5]]" in logs[rank]


EARLY = """
import os, pathlib, time
import paddle
from paddle import distributed
rank, early = os.environ["PADDLE_TRAINER_ID"], pathlib.Path("early")
if rank == "1":
    early.touch()
while not early.exists():
    time.sleep(0.01)
{connect}
print("rank", rank, "is connected")
"""
# A rank that ends at once may be gone before the other one has connected to it.
CONNECT = "distributed.init_parallel_env(); distributed.barrier()"


@pytest.mark.parametrize(
    ("version", "mode", "connect"),
    [
        ("3.3.1", "--run_mode=collective", CONNECT),
        # Paddle 3's wheel is built without RPC.
        (
            "2.6.2",
            "--run_mode=rpc",
            "from paddle.distributed.rpc import *; init_rpc(rank); shutdown()",
        ),
    ],
)
def test_a_rank_that_is_there_before_the_store_does_not_sleep(
    version: str, mode: str, connect: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(EARLY.format(connect=connect))
    done = run(
        PYTHONS[version], ["-m", "fleetrun", "--nproc_per_node=2", mode, "train.py"], tmp_path
    )
    assert done.returncode == 0, done.stdout
    log = (tmp_path / "log" / "workerlog.1").read_text()
    assert "rank 1 is connected" in log
    # What Paddle says before it sleeps for three seconds.
    assert "not yet listening" not in log
