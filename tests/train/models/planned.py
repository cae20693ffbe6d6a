"""Trains for as many steps as a plan of buckets takes, and some more.

Reports the weights beside those of one process that gets the batches of both ranks, and how many
float allreduces each backward made.
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
STEPS = 60


def train(net: Any, ranks: "list[int]") -> "list[int]":
    """Train NET with the batches of RANKS; return the allreduces of each backward."""
    optimizer = paddle.optimizer.Momentum(0.01, parameters=net.parameters())
    numbers = [np.random.RandomState(each) for each in ranks]
    made = []
    for _ in range(STEPS):
        batch = np.concatenate([each.randn(4, 64) for each in numbers]).astype("float32")
        loss = (net(paddle.to_tensor(batch)) ** 2).mean()
        before = calls[0]
        loss.backward()
        made.append(calls[0] - before)
        optimizer.step()
        optimizer.clear_grad()
    return made


def new() -> Any:
    paddle.seed(5)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


net, alone = new(), new()
made = train(paddle.DataParallel(net), [rank])
train(alone, [0, 1])
weights = [
    [float(value) for each in one.parameters() for value in each.numpy().ravel()[:50]]
    for one in (net, alone)
]
report = {"weights": weights[0], "alone": weights[1], "made": made}
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
