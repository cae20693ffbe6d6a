"""Updates weights with the script's own optimizer, alone and beside one of Paddle's.

Reports the weights beside those of one process, whether there was evidence after each backward,
and the error that stopped the script with both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from twins import batches, rank, twins, weights, write

paddle.distributed.init_parallel_env()
kernels: Any = paddle._C_ops


class Descent:
    """Steepest descent."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        """Update the parameters."""
        for parameter in self.parameters:
            if os.environ.get("KERNELS"):
                kernels.sgd_(parameter, paddle.to_tensor([0.1]), parameter.grad, None, False)  # noqa: FBT003
            else:
                parameter.set_value(parameter - 0.1 * parameter.grad)
            parameter.clear_gradient()


def train(net: Any, model: Any, ranks: list[int]) -> list[bool]:
    """Train; return whether there was evidence after each backward."""
    optimizer, were_complete = Descent(net.parameters()), []
    for _, batch in zip(range(4), batches(ranks, 4, 8), strict=False):
        (model(batch) ** 2).mean().backward()
        path = Path(os.environ["FLEETRUN_RECORDS"])
        were_complete.append(path.exists() and '"complete": true' in path.read_text())
        optimizer.step()
    return were_complete


net, alone = twins(lambda: nn.Linear(8, 4))
told = train(net, paddle.DataParallel(net), [rank])
train(alone, alone, [0, 1])
report = {"weights": weights(net), "alone": weights(alone), "told": told}
net = nn.Linear(8, 4)
unused = paddle.optimizer.SGD(0.1, parameters=net.parameters())
try:
    train(net, paddle.DataParallel(net), [rank])
except RuntimeError as error:
    report["stopped"] = str(error)
write(report)
