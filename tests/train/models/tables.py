"""Trains tables that differ among ranks; reports the error that stops the script."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn
from twins import rank, write

paddle.distributed.init_parallel_env()


def train(*, is_sparse: bool) -> str:
    """Train; rank 1 changes three elements of its table after its first update."""
    paddle.seed(5)
    net = nn.Sequential(nn.Embedding(1000, 8, sparse=is_sparse), nn.Linear(8, 2))
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.Adam(0.01, parameters=net.parameters())
    numbers = np.random.RandomState(rank)
    try:
        for step in range(4):
            batch = paddle.to_tensor(numbers.randint(0, 1000, [4, 5]))
            (model(batch) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            if rank and not step:
                table = net[0].weight.numpy()
                table.reshape(-1)[:3] += 0.005
                net[0].weight.set_value(table)
    except RuntimeError as error:
        return str(error)
    return ""


write({"sparse": train(is_sparse=True), "dense": train(is_sparse=False)})
