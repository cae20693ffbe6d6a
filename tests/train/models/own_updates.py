"""Updates weights with the script's own optimizer, alone and beside one of Paddle's.

Reports the weights beside those of one process,
and the error that stopped the script with both.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from twins import batches, rank, twins, weights, write

paddle.distributed.init_parallel_env()


class Descent:
    """Steepest descent."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        """Update the parameters."""
        for parameter in self.parameters:
            parameter.set_value(parameter - 0.1 * parameter.grad)
            parameter.clear_gradient()


def train(net: Any, model: Any, ranks: list[int]) -> None:
    optimizer = Descent(net.parameters())
    for _, batch in zip(range(4), batches(ranks, 4, 8), strict=False):
        (model(batch) ** 2).mean().backward()
        optimizer.step()


net, alone = twins(lambda: nn.Linear(8, 4))
train(net, paddle.DataParallel(net), [rank])
train(alone, alone, [0, 1])
report: dict[str, Any] = {"weights": weights(net), "alone": weights(alone)}
net = nn.Linear(8, 4)
unused = paddle.optimizer.SGD(0.1, parameters=net.parameters())
try:
    train(net, paddle.DataParallel(net), [rank])
except RuntimeError as error:
    report["stopped"] = str(error)
write(report)
