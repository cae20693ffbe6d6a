"""Trains one model after another; reports threads, descriptors and weights with each.

Also reports whether models and optimizers were freed.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from twins import rank, write

MODELS = 6
paddle.distributed.init_parallel_env()


def train() -> "tuple[list[float], list[Any]]":
    """Train a model; return its weights, and weak references to what must be freed."""
    paddle.seed(5)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model: Any = paddle.DataParallel(net)
    optimizer: Any = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    batch = paddle.to_tensor(np.random.RandomState(rank).randn(3, 4).astype("float32"))
    for _ in range(4):
        (model(batch) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    weights = [
        float(value) for parameter in net.parameters() for value in parameter.numpy().ravel()
    ]
    return weights, [weakref.ref(model), weakref.ref(optimizer)]


report: dict[str, Any] = {"seen": [], "weights": []}
references: list[Any] = []
for _ in range(MODELS):
    weights, those = train()
    references += those
    gc.collect()
    report["weights"].append(weights)
    report["seen"].append(len(list(Path("/proc/self/fd").iterdir())))
report["are_gone"] = all(reference() is None for reference in references)
write(report)
