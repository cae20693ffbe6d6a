"""Trains models that are plain at first, and not all of them later.

Reports the weights beside those of one process with the batches of all ranks; and the number of
allreduces that Python was asked for in each update.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

rank = int(os.environ["PADDLE_TRAINER_ID"])
LATE = 5
calls = [0]
plain = core.ProcessGroup.all_reduce


def counted(*args: Any) -> Any:
    if args[1].dtype == paddle.float32:
        calls[0] += 1
    return plain(*args)


setattr(core.ProcessGroup, "all_reduce", counted)
paddle.distributed.init_parallel_env()


def loss_of(out: Any) -> Any:
    return (out**2).mean()


def several(model: Any, batch: Any, *, is_late: bool, is_alone: bool) -> None:
    """Take two losses of one graph, later one after the other."""
    out = model(batch)
    if is_late and not is_alone:
        loss_of(out).backward(retain_graph=True)
        loss_of(out + 1).backward()
    else:
        (loss_of(out) + loss_of(out + 1)).backward()


def accumulated(model: Any, batch: Any, *, is_late: bool, is_alone: bool) -> None:
    """Later keep one half of the batch here until the other is averaged."""
    half = batch.shape[0] // 2
    if is_late and not is_alone:
        with model.no_sync():
            (loss_of(model(batch[:half])) / 2).backward()
        (loss_of(model(batch[half:])) / 2).backward()
    else:
        loss_of(model(batch)).backward()


def probed(model: Any, batch: Any, *, is_late: bool, is_alone: bool) -> None:
    """Later one rank trains a model of its own between forward and backward."""
    out = model(batch)
    if is_late and not is_alone and rank == 0:
        loss_of(nn.Linear(4, 2)(out.detach())).backward()
    loss_of(out).backward()


def plain_steps(model: Any, batch: Any, **_: bool) -> None:
    """Do as everybody does."""
    loss_of(model(batch)).backward()


def train(name: str, net: Any, model: Any, ranks: "list[int]") -> "dict[str, Any]":
    """Train; return the weights, and the number of allreduces in each update."""
    ways = {"several": several, "accumulated": accumulated, "probed": probed}
    way = ways.get(name, plain_steps)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=net.parameters())
    numbers = [np.random.RandomState(rank) for rank in ranks]
    made = []
    for step in range(1, 9):
        before = calls[0]
        batch = np.concatenate([each.randn(4, 8) for each in numbers], dtype="float32")
        if step == LATE:
            for each in net.parameters():
                each.stop_gradient = False
        way(model, paddle.to_tensor(batch), is_late=step >= LATE, is_alone=len(ranks) > 1)
        optimizer.step()
        # Of zeros, or none at all.
        optimizer.clear_grad(set_to_zero=step % 2 == 0)
        made.append(calls[0] - before)
    weights = [float(value) for each in net.parameters() for value in each.numpy().ravel()]
    return {"weights": weights, "allreduces": made}


report = {}
for name in ("plain", "several", "accumulated", "thawed", "probed"):
    paddle.seed(5)
    net, alone = (nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
    alone.set_state_dict(net.state_dict())
    for each in (net, alone):
        each[0].weight.stop_gradient = name == "thawed"
    report[name] = train(name, net, paddle.DataParallel(net), [rank])
    report[name]["alone"] = train(name, alone, alone, [0, 1])["weights"]
# A layer of this rank alone, which Paddle 2.6.2 makes no reducer beside.
own = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
for parameter in own[0].parameters():
    parameter.no_sync = True
report["own"] = train("own", own, paddle.DataParallel(own), [rank])
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
