"""Trains with gradients that are sent in 16 bits; reports the dtypes that went out.

And the weights beside those of one process that sees the batches of all ranks.
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
sent: list[str] = []
plain = core.ProcessGroup.all_reduce


def counted(*args: Any) -> Any:
    sent.append(str(args[1].dtype).rpartition(".")[2].lower())
    return plain(*args)


setattr(core.ProcessGroup, "all_reduce", counted)
paddle.distributed.init_parallel_env()


def train(model: Any, ranks: "list[int]") -> "list[float]":
    """Train with the batches of RANKS; return the weights."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    numbers = [np.random.RandomState(each) for each in ranks]
    for _ in range(6):
        sent.clear()
        batch = np.concatenate([each.randn(5, 4) for each in numbers]).astype("float32")
        (model(paddle.to_tensor(batch)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [float(value) for each in model.parameters() for value in each.numpy().ravel()]


def new() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


paddle.seed(5)
net, alone = new(), new()
alone.set_state_dict(net.state_dict())
weights = train(paddle.DataParallel(net), [rank])
report = {
    "weights": weights,
    "sent": [*sent],
    "alone": train(alone, [*range(paddle.distributed.get_world_size())]),
}
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
