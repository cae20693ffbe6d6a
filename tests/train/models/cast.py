"""Trains models that are cast to another dtype after they were wrapped, at once or later.

Reports the weights beside those of one process with the batches of all ranks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

rank = int(os.environ["PADDLE_TRAINER_ID"])
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


def cast(way: str, net: Any, model: Any) -> None:
    """Cast all or a part of NET, which MODEL wraps."""
    if way == "to":
        model.to(dtype="float64")
    elif way == "astype":
        net.astype("float64")
    else:
        net.parts[1].to(dtype="float64")


def train(way: str, when: int, net: Any, model: Any, ranks: list[int]) -> list[float]:
    """Train, and cast before the step WHEN; return the weights."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    numbers = [np.random.RandomState(rank) for rank in ranks]
    for step in range(1, 9):
        if step == when:
            cast(way, net, model)
        batch = np.concatenate([each.randn(4, 8) for each in numbers], dtype="float32")
        (model(paddle.to_tensor(batch)).cast("float32") ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=step % 2 == 0)
    return [float(value) for each in net.parameters() for value in each.numpy().ravel()]


report = {}
for way in ("to", "astype", "part"):
    for when in (1, LATE):
        paddle.seed(5)
        net, alone = Net(), Net()
        alone.set_state_dict(net.state_dict())
        report[f"{way} {when}"] = {
            "weights": train(way, when, net, paddle.DataParallel(net), [rank]),
            "alone": train(way, when, alone, alone, [0, 1]),
        }
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
