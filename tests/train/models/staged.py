"""Trains with hierarchical allreduces, and lets stages go on only once others have begun.

The second stage of the first bucket waits until the last bucket is in its first one. And backward
waits with its last layer until the second stage of the first bucket has begun. Who waits in vain
says so. The weights are reported beside those of one process with the batches of all ranks.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

if TYPE_CHECKING:
    from collections.abc import Callable

rank, nranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
STEPS, WAITED_S = 4, 60.0
# Gradients of the bucket that is sent first, and of the one that is sent last: a layer is a bucket.
SENT_FIRST, SENT_LAST = 8 * 2 + 2, 4 * 6 + 6
asked = json.loads(Path(os.environ["FLEETRUN_STRATEGY_FILE"]).read_text())["strategy"]
size = asked["hierarchical_allreduce_inter_nranks"]
# Who is alone in its group has one stage only.
is_alone = rank % size == 0 and rank == nranks - 1
# Gradients by stage, in the order in which they go through it.
stages: dict[str, list[int]] = {"reduce": [], "all_reduce": [], "broadcast": []}
waited: list[bool] = []
second_begins, last_begins = threading.Event(), threading.Event()


def staged(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def begin(group: Any, tensor: Any, *args: Any) -> Any:
        if tensor.dtype != paddle.float32:
            return plain(group, tensor, *args)
        stages[name].append(tensor.size)
        if name == "reduce" and tensor.size == SENT_LAST:
            last_begins.set()
        is_second = name != "reduce" and not is_alone and not second_begins.is_set()
        if is_second and tensor.size == SENT_FIRST:
            second_begins.set()
            waited.append(last_begins.wait(WAITED_S))
        return plain(group, tensor, *args)

    return begin


for name in stages:
    setattr(core.ProcessGroup, name, staged(name, getattr(core.ProcessGroup, name)))
paddle.distributed.init_parallel_env()


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Three layers, the first of which waits in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        if self.waits:
            x.register_hook(self._wait)
        return self.last(self.middle(x))

    waits = False

    def _wait(self, gradient: Any) -> Any:
        if not is_alone:
            waited.append(second_begins.wait(WAITED_S))
        return gradient


def train(model: Any, ranks: list[int]) -> list[float]:
    """Train with the batches of RANKS; return the weights."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    numbers = [np.random.RandomState(each) for each in ranks]
    for _ in range(STEPS):
        second_begins.clear()
        last_begins.clear()
        batch = np.concatenate([each.randn(5, 4) for each in numbers]).astype("float32")
        (model(paddle.to_tensor(batch)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [float(value) for each in model.parameters() for value in each.numpy().ravel()]


paddle.seed(5)
net, alone = Net(), Net()
alone.set_state_dict(net.state_dict())
net.waits = True
model = paddle.DataParallel(net)
for sizes in stages.values():
    sizes.clear()
weights = train(model, [rank])
report = {"weights": weights, "stages": {name: list(sizes) for name, sizes in stages.items()}}
report |= {"waited": list(waited), "alone": train(alone, list(range(nranks)))}
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
