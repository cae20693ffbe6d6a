"""Trains until buckets are planned, and some steps more.

Reports the weights beside those of one process that gets the batches of both ranks, and how many
float allreduces each backward made.
"""

from __future__ import annotations

from typing import Any

import paddle
from counting import Meter
from paddle import nn
from twins import batches, rank, twins, weights, write

STEPS = 60
meter = Meter()
paddle.distributed.init_parallel_env()


def train(net: Any, ranks: list[int]) -> None:
    """Train NET with the batches of RANKS."""
    optimizer = paddle.optimizer.Momentum(0.01, parameters=net.parameters())
    drawn = batches(ranks, 4, 64)
    for _ in range(STEPS):
        loss = (net(next(drawn)) ** 2).mean()
        with meter.running():
            loss.backward()
        optimizer.step()
        optimizer.clear_grad()


net, alone = twins(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))))
train(paddle.DataParallel(net), [rank])
made = meter.allreduces
train(alone, [0, 1])
write({"weights": weights(net), "alone": weights(alone), "made": made})
