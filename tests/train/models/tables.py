"""Trains tables that differ among ranks in a few rows, or many; and skips updates.

Reports the error that stops the script.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from twins import rank, write

paddle.distributed.init_parallel_env()


def train(is_sparse: bool, elements: int, *, skips: bool = False) -> str:
    """Train; rank 1 changes the first ELEMENTS of its table after its first update."""
    paddle.seed(5)
    net = nn.Sequential(nn.Embedding(1000, 8, sparse=is_sparse), nn.Linear(8, 2))
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.Adam(0.01, parameters=net.parameters())
    if skips:
        # GradScaler does this where a gradient is not finite.
        optimizer._set_auxiliary_var("found_inf", paddle.to_tensor([True]))
    numbers = np.random.RandomState(rank)
    try:
        for step in range(4):
            batch = paddle.to_tensor(numbers.randint(0, 1000, [4, 5]))
            (model(batch) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            if rank and not step:
                table = net[0].weight.numpy()
                table.reshape(-1)[:elements] += 0.005
                net[0].weight.set_value(table)
    except RuntimeError as error:
        return str(error)
    return ""


report: dict[str, Any] = {"skipped": train(is_sparse=True, elements=0, skips=True)}
report["few"] = train(is_sparse=True, elements=3)
report["rows"] = train(is_sparse=True, elements=800)
report["dense"] = train(is_sparse=False, elements=3)
write(report)
