"""Trains a model with sparse, shared, frozen and unused parameters; prints weights, allreduces."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from counting import Meter
from paddle import nn
from twins import rank, weights, write

paddle.distributed.init_parallel_env()
paddle.seed(5)


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """All kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, sparse=True)
        self.first = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1D(16)
        self.shared = nn.Linear(16, 16)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(16, 16)
        for parameter in self.frozen.parameters():
            parameter.stop_gradient = True
        self.last = nn.Linear(16, 4)

    def forward(self, words: Any, more: bool) -> Any:
        hidden = self.norm(self.first(self.words(words).mean(1)))
        hidden = self.frozen(self.shared(self.shared(hidden)))
        return self.last(hidden + self.sometimes(hidden) if more else hidden)


net = Net()
model = paddle.DataParallel(net, find_unused_parameters=True)
optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
numbers = np.random.RandomState(rank)
meter = Meter()
for step in range(5):
    words = paddle.to_tensor(numbers.randint(0, 50, (8, 4)))
    with meter.running():
        (model(words, step >= 2 and rank == 1) ** 2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
report = {"weights": weights(net), "allreduces": meter.allreduces[-1]}
write({**report, "none": net.never.weight.grad is None})
