"""Trains layers that are used in another order than they are made in; reports what went out when.

What is reported of each backward: the names of the gradients as they come, and the number of values
of each allreduce. And the weights beside those that one process gets from the batches of all ranks.
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
seen: list[Any] = []
plain = core.ProcessGroup.all_reduce


def counted(*args: Any) -> Any:
    if args[1].dtype == paddle.float32:
        seen.append(args[1].size)
    return plain(*args)


setattr(core.ProcessGroup, "all_reduce", counted)
paddle.distributed.init_parallel_env()


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Layers of which the last one is used first, but for one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 2)
        self.middle = nn.Linear(6, 8)
        self.first = nn.Linear(4, 6)
        self.unused = nn.Linear(3, 5)

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x)))


def train(model: Any, ranks: "list[int]") -> "list[float]":
    """Train with the batches of RANKS; return the weights."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    numbers = [np.random.RandomState(rank) for rank in ranks]
    for _ in range(4):
        seen.append([])
        batch = np.concatenate([each.randn(5, 4) for each in numbers]).astype("float32")
        (model(paddle.to_tensor(batch)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [float(value) for each in model.parameters() for value in each.numpy().ravel()]


paddle.seed(5)
net, alone = Net(), Net()
alone.set_state_dict(net.state_dict())
for name, layer in net.named_children():
    layer.weight._register_backward_hook(lambda name=name: seen.append(name))
model = paddle.DataParallel(net, find_unused_parameters=True)
seen.clear()
report = {"weights": train(model, [rank]), "seen": list(seen), "alone": train(alone, [0, 1])}
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
