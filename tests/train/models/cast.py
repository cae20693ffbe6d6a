"""Trains models that are cast to another dtype after they were wrapped, at once or later.

And one that a compiled function calls: Paddle's translator meets our frames. Reports the weights
beside those of one process with the batches of all ranks.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn
from twins import batches, compare, mlp, train, weights, write

if TYPE_CHECKING:
    from collections.abc import Callable

LATE = 5
paddle.distributed.init_parallel_env()


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Three layers, each of which computes in the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.LayerList([nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)])

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x.cast(part.weight.dtype))
        return x.cast("float32")


class Products(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Products with three vectors: Paddle's CPU kernels offer little else in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([paddle.create_parameter([8], "float32") for _ in range(3)])

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = (x.cast(part.dtype) * part).cast("float32") + 1.0
        return x


# How a model, or the net in it, is cast, as a whole or in part.
WAYS: dict[str, Callable[[Any, Any], object]] = {
    "to": lambda model, _: model.to(dtype="float64"),
    "astype": lambda _, net: net.astype("float64"),
    "part": lambda _, net: net.parts[1].to(dtype="float64"),
    "bfloat16": lambda model, _: model.to(dtype="bfloat16"),
}


def compare_cast(way: str, when: int) -> Any:
    """Compare trainings that cast in this WAY before the step WHEN."""

    def train_by(model: Any, ranks: list[int]) -> Any:
        def before(step: int) -> None:
            if step == when:
                WAYS[way](model, getattr(model, "_layers", model))

        return train(model, batches(ranks, 4, 8), 8, before)

    return compare(Products if way == "bfloat16" else Net, train_by)


def train_compiled(model: Any, ranks: list[int]) -> Any:
    """Train by compiled functions: one of the loss, and one of a whole step."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())

    def loss(x: Any) -> Any:
        return (model(x) ** 2).mean()

    def step(x: Any) -> None:
        loss(x).backward()
        optimizer.step()
        optimizer.clear_grad()

    compiled, compiled_step = (
        paddle.jit.to_static(function, full_graph=False) for function in (loss, step)
    )
    for number, batch in enumerate(islice(batches(ranks, 4, 8), 6)):
        if number % 2:
            compiled(batch).backward()
            optimizer.step()
            optimizer.clear_grad()
        else:
            compiled_step(batch)
    return weights(model)


report = {f"{way} {when}": compare_cast(way, when) for way in WAYS for when in (1, LATE)}
write({**report, "compiled": compare(mlp, train_compiled)})
