"""Looks up tables by functions that make gradients sparse, late and on some ranks only.

Reports the weights beside those of one process with the batches of all ranks, and the error that
stops Adam.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import nn
from twins import rank, twins, weights, write

if TYPE_CHECKING:
    from collections.abc import Iterator

LATE = 4
paddle.distributed.init_parallel_env()


class Words(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Looks up words in its own table, with sparse gradients from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = self.create_parameter([20, 6]), nn.Linear(6, 3)
        self.is_sparse = False

    def forward(self, x: Any) -> Any:
        embedded = nn.functional.embedding(x, self.table, sparse=self.is_sparse)
        return self.last(embedded.mean(1))


def words(ranks: list[int]) -> Iterator[Any]:
    """Yield the words of each of RANKS, without end."""
    generators = [np.random.RandomState(rank) for rank in ranks]
    while True:
        yield paddle.to_tensor(
            np.concatenate([generator.randint(0, 20, [4, 5]) for generator in generators])
        )


def train(name: str, net: Any, model: Any, ranks: list[int]) -> list[float]:
    """Train; return the weights."""
    kind = {"adam": paddle.optimizer.Adam}.get(name, paddle.optimizer.Momentum)
    optimizer, drawn = kind(0.1, parameters=net.parameters()), words(ranks)
    for step in range(1, 9):
        is_here = name != "one" or rank or len(ranks) > 1
        net.is_sparse = is_here and (step >= LATE or name == "first")
        (model(next(drawn)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return list(weights(net))


report: dict[str, Any] = {}
for name in ("first", "late", "one", "adam"):
    net, alone = twins(Words)
    try:
        report[name] = train(name, net, paddle.DataParallel(net), [rank])
    except RuntimeError as error:
        report[name] = str(error)
    else:
        report[f"alone {name}"] = train(name, alone, alone, [0, 1])
write(report)
