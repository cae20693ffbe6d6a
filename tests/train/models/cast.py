"""Trains models that are cast to another dtype after they were wrapped, at once or later.

Reports the weights beside those of one process with the batches of all ranks.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from twins import batches, rank, twins, weights, write  # type: ignore[import-not-found, unused-ignore]

LATE = 5
paddle.distributed.init_parallel_env()


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Three layers, each of which computes in the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.LayerList([nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)])

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x.cast(part.weight.dtype))
        return x


class Products(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Products with three vectors: of 16 bits Paddle's CPU kernels have little else."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([paddle.create_parameter([8], "float32") for _ in range(3)])

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = (x.cast(part.dtype) * part).cast("float32") + 1.0
        return x


def cast(way: str, net: Any, model: Any) -> None:
    """Cast all or a part of NET, which MODEL wraps."""
    if way == "to":
        model.to(dtype="float64")
    elif way == "bfloat16":
        model.to(dtype="bfloat16")
    elif way == "astype":
        net.astype("float64")
    else:
        net.parts[1].to(dtype="float64")


def train(way: str, when: int, net: Any, model: Any, ranks: list[int]) -> list[float]:
    """Train, and cast before the step WHEN; return the weights."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    drawn = batches(ranks, 4, 8)
    for step in range(1, 9):
        if step == when:
            cast(way, net, model)
        (model(next(drawn)).cast("float32") ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=step % 2 == 0)
    return list(weights(net))


report = {}
for way in ("to", "astype", "part", "bfloat16"):
    for when in (1, LATE):
        net, alone = twins(Products if way == "bfloat16" else Net)
        report[f"{way} {when}"] = {
            "weights": train(way, when, net, paddle.DataParallel(net), [rank]),
            "alone": train(way, when, alone, alone, [0, 1]),
        }
write(report)
