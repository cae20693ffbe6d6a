"""Trains a model whose ranks diverge late, and one whose ranks differ by rounding only.

Reports the error that stops the script, and after which updates the ranks were compared.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import paddle
from paddle import nn
from twins import rank, write

PART_WAYS = 40
paddle.distributed.init_parallel_env()
# Each comparison starts here, whatever its result.
gathers: list[int] = []
store: Any = sys.modules["_fleetrun_inject.store"]
plain = store.all_gather
updates = 0


def counted(*args: Any, **options: Any) -> Any:
    """Note the update of a comparison, once."""
    if updates not in gathers:
        gathers.append(updates)
    return plain(*args, **options)


store.all_gather = counted


def train(by: float, steps: int) -> dict[str, Any]:
    """Train; rank 1 changes one weight by the relative amount BY when it diverges."""
    global updates  # noqa: PLW0603 - of this training
    updates = 0
    gathers.clear()
    paddle.seed(5)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters())
    numbers = np.random.RandomState(rank)
    try:
        for step in range(1, steps + 1):
            batch = paddle.to_tensor(numbers.randn(4, 6).astype("float32"))
            (model(batch) ** 2).mean().backward()
            if rank and step == PART_WAYS:
                net[0].weight.set_value(net[0].weight * (1 + by))
            updates = step
            optimizer.step()
            optimizer.clear_grad()
    except RuntimeError as error:
        return {"stopped": str(error), "compared": list(gathers)}
    return {"stopped": "", "compared": list(gathers)}


report = {"apart": train(0.1, 70), "rounded": train(2e-7, 200)}
write(report)
