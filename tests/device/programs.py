"""Programs of ranks in tests of the device: `programs.py NAME`; each rank reports its results."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import distributed as dist
from paddle.version import full_version

rank, world = (int(os.environ[f"PADDLE_TRAINER{name}"]) for name in ("_ID", "S_NUM"))


def tensor(*values: float) -> Any:
    return paddle.to_tensor(np.array(values, dtype="float32"))


def collectives() -> dict[str, Any]:
    """Do each collective once; rank r begins with [r + 1, r + 2]."""
    dist.init_parallel_env()
    results: dict[str, Any] = {"place": str(tensor(0).place)}

    def own() -> Any:
        return tensor(rank + 1, rank + 2)

    for name, how in (("sum", "SUM"), ("max", "MAX"), ("min", "MIN"), ("product", "PROD")):
        value = own()
        dist.all_reduce(value, op=getattr(dist.ReduceOp, how))
        results[name] = value.tolist()
    value = own()
    dist.broadcast(value, 1)
    results["broadcast"] = value.tolist()
    value = own()
    dist.reduce(value, 1)
    results["reduce"] = value.tolist() if rank == 1 else None
    parts: list[Any] = []
    dist.all_gather(parts, own())
    results["all_gather"] = [part.tolist() for part in parts]
    value = paddle.zeros([2])
    dist.reduce_scatter(value, [own() * (peer + 1) for peer in range(world)])
    results["reduce_scatter"] = value.tolist()
    parts = []
    dist.alltoall(
        out_tensor_list=parts, in_tensor_list=[own() * (peer + 1) for peer in range(world)]
    )
    results["all_to_all"] = [part.tolist() for part in parts]
    # Each rank sends to the next one, and receives from the previous one.
    value = paddle.zeros([2])
    sent = dist.isend(own(), (rank + 1) % world)
    received = dist.irecv(value, (rank - 1) % world)
    assert sent is not None
    assert received is not None
    sent.wait()
    received.wait()
    results["ring"] = value.tolist()
    objects: list[Any] = []
    dist.all_gather_object(objects, {"rank": rank})
    results["objects"] = objects
    # Paddle 2.6 lacks these sums on plug-ins.
    halves = own().astype("float32" if full_version < "3" else "bfloat16")
    dist.all_reduce(halves)
    results["halves"] = halves.astype("float32").tolist()
    return results


def training() -> dict[str, Any]:
    """Train a convolution and linear layers with plain Paddle and Adam."""
    dist.init_parallel_env()
    paddle.seed(5)
    net = paddle.nn.Sequential(
        *(paddle.nn.Conv2D(1, 4, 3), paddle.nn.BatchNorm2D(4), paddle.nn.ReLU()),
        *(paddle.nn.Flatten(), paddle.nn.Linear(64, 32), paddle.nn.LayerNorm(32)),
        *(paddle.nn.GELU(), paddle.nn.Linear(32, 4)),
    )
    # Statistics of a batch differ among ranks.
    net[1].eval()
    model = paddle.DataParallel(net) if world > 1 else net
    optimizer = paddle.optimizer.Adam(0.01, parameters=net.parameters())
    numbers = np.random.RandomState(3)
    for _ in range(6):
        images = numbers.randn(12, 1, 6, 6).astype("float32")
        labels = numbers.randint(0, 4, 12)
        images, labels = (np.split(every, world)[rank] for every in (images, labels))
        guess = model(paddle.to_tensor(images))
        loss = paddle.nn.functional.cross_entropy(guess, paddle.to_tensor(labels))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    return {
        "place": str(net[0].weight.place),
        "weights": [
            value for parameter in net.parameters() for value in parameter.numpy().ravel().tolist()
        ],
    }


def unordered() -> dict[str, Any]:
    """Add 1 to a sum of all ranks: after a wait, and without one while another rank is awaited."""
    dist.init_parallel_env()

    def begun() -> tuple[Any, Any]:
        value = paddle.full([1000], rank + 1.0)
        return value, dist.all_reduce(value, sync_op=False)

    value, task = begun()
    task.wait()
    results = {"waited": (value + 1)[0].item()}
    for first in range(world):
        added = Path(f"{os.environ['OUTPUT']}.added.{first}")
        while rank != first and not added.exists():
            time.sleep(0.005)
        value, task = begun()
        if rank == first:
            results["not waited"] = (value + 1)[0].item()
            added.touch()
        task.wait()
    return results


def views() -> dict[str, Any]:
    """Add 1 to a view of a buffer."""
    paddle.device.set_device(f"{os.environ['TESTDEVICE_KIND']}:0")
    flat: Any = paddle.zeros([4])
    part = paddle.base.core.eager.Tensor(flat.get_tensor()._slice(0, 2), flat.place)
    with paddle.no_grad():
        part.add_(paddle.ones([2]))
    assert flat.tolist() == [1, 1, 0, 0], f"the buffer is {flat.tolist()}"
    return {}


def halves() -> dict[str, Any]:
    """Add bfloat16 tensors."""
    paddle.device.set_device(f"{os.environ['TESTDEVICE_KIND']}:0")
    value = paddle.ones([2]).astype("bfloat16")
    (value + value).numpy()
    return {}


def cut() -> dict[str, Any]:
    """Scatter a tensor to the ranks."""
    dist.init_parallel_env()
    dist.shard_tensor(paddle.ones([2]), dist.ProcessMesh([0, 1]), [dist.Shard(0)])
    return {}


def static() -> dict[str, Any]:
    """Make a static graph for several ranks, or run one of a single rank."""
    paddle.enable_static()
    value = paddle.static.data("value", [4, 2])
    loss = paddle.static.nn.fc(value, 1).mean()
    if world > 1:
        fleet: Any = dist.fleet
        fleet.init(is_collective=True)
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
        return {}
    paddle.device.set_device(f"{os.environ['TESTDEVICE_KIND']}:0")
    executor = paddle.static.Executor()
    executor.run(paddle.static.default_startup_program())
    feed = {"value": np.ones([4, 2], dtype="float32")}
    executor.run(feed=feed, fetch_list=[loss])
    return {}


def sums() -> dict[str, Any]:
    """Sum five times."""
    dist.init_parallel_env()
    totals = []
    for number in range(5):
        value = tensor(rank + number)
        dist.all_reduce(value)
        totals.append(value.item())
    return {"sums": totals}


if __name__ == "__main__":
    report = globals()[sys.argv[1]]()
    Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report), encoding="utf-8")
