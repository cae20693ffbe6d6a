"""Trains with a compiled function that calls the model: Paddle's translator meets our frames.

Reports the weights beside those of one process with the batches of all ranks.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import paddle
from twins import batches, compare, mlp, weights, write

paddle.distributed.init_parallel_env()


def train(model: Any, ranks: list[int]) -> Any:
    def loss(x: Any) -> Any:
        return (model(x) ** 2).mean()

    compiled = paddle.jit.to_static(loss, full_graph=False)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for batch in islice(batches(ranks, 4, 8), 6):
        compiled(batch).backward()
        optimizer.step()
        optimizer.clear_grad()
    return weights(model)


write(compare(mlp, train))
