"""Trains layers that are used in another order than they are made; reports what was sent when.

For each backward these are the names of the gradients in order, and the number of values of each
allreduce; then the weights beside those of one process with the batches of all ranks.
"""

from __future__ import annotations

from typing import Any

import paddle
from counting import observe
from paddle import nn
from twins import batches, rank, train, twins, write

STEPS = 4
seen: list[Any] = []


def note(_name: str, _group: Any, tensor: Any) -> None:
    if tensor.dtype == paddle.float32:
        seen.append(tensor.size)


observe(note, "all_reduce")
paddle.distributed.init_parallel_env()


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Layers that are made from the last to the first; one of them is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 2)
        self.middle = nn.Linear(6, 8)
        self.first = nn.Linear(4, 6)
        self.unused = nn.Linear(3, 5)

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x)))


net, alone = twins(Net)
for name, layer in net.named_children():
    layer.weight._register_backward_hook(lambda name=name: seen.append(name))
model = paddle.DataParallel(net, find_unused_parameters=True)
seen.clear()
weights = train(model, batches([rank], 5, 4), STEPS, before=lambda _: seen.append([]))
report = {"weights": weights, "seen": [*seen]}
write({**report, "alone": train(alone, batches([0, 1], 5, 4), STEPS)})
