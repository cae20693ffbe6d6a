"""Trains with several forwards or backwards in one update.

Reports the weights beside those that one process gets from one backward of all that, over the
batches of all ranks; and the number of allreduces in the last update.
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


def retain(model: Any, one: Any, _other: Any) -> None:
    """Take two losses of one graph, one after the other."""
    out = model(one)
    loss_of(out).backward(retain_graph=True)
    loss_of(out + 1).backward()


def retain_at_once(model: Any, one: Any, _other: Any) -> None:
    """Take the same losses in one backward."""
    out = model(one)
    (loss_of(out) + loss_of(out + 1)).backward()


def accumulate(model: Any, one: Any, other: Any) -> None:
    """Keep one micro-batch here, until the other one is averaged."""
    with model.no_sync():
        loss_of(model(one)).backward()
    loss_of(model(other)).backward()


def cross(model: Any, one: Any, other: Any) -> None:
    """Make both forwards before both backwards."""
    first, second = loss_of(model(one)), loss_of(model(other))
    first.backward()
    second.backward()


def look_on(model: Any, one: Any, other: Any) -> None:
    """Make a forward under `no_sync` before the backward of one that is to be averaged."""
    first = model(one)
    with model.no_sync():
        second = model(other)
    (loss_of(first) + loss_of(second)).backward()


def at_once(model: Any, one: Any, other: Any) -> None:
    """Take both micro-batches in one backward."""
    (loss_of(model(one)) + loss_of(model(other))).backward()


def train(way: Any, model: Any, ranks: "list[int]") -> "tuple[list[float], int]":
    """Train in this WAY; return the weights and the number of allreduces in the last update."""
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    numbers = [np.random.RandomState(rank) for rank in ranks]
    before = 0
    for step in range(4):
        batches = [
            paddle.to_tensor(
                np.concatenate([each.randn(4, 8) for each in numbers], dtype="float32")
            )
            for _ in range(2)
        ]
        before = calls[0]
        way(model, *batches)
        optimizer.step()
        # Of zeros, or none at all.
        optimizer.clear_grad(set_to_zero=step != 1)
    made = calls[0] - before
    return [float(value) for each in model.parameters() for value in each.numpy().ravel()], made


report = {}
WAYS = {retain: retain_at_once, accumulate: at_once, cross: at_once, look_on: at_once}
for way, whole in WAYS.items():
    paddle.seed(5)
    net, alone = (nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
    alone.set_state_dict(net.state_dict())
    weights, made = train(way, paddle.DataParallel(net), [rank])
    expected, _ = train(whole, alone, [0, 1])
    report[way.__name__] = {"weights": weights, "alone": expected, "allreduces": made}
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
