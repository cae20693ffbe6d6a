"""Trains for some steps; the second rank waits in a hook and in Python's part of the backward."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

dist.init_parallel_env()


class Late(PyLayer):  # type: ignore[misc, unused-ignore]
    """Passes its input on."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Return a copy."""
        ctx.is_late = dist.get_rank() == 1
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return a copy, late on the second rank."""
        if ctx.is_late:
            time.sleep(0.04)
        # What waits for the other rank is no work.
        dist.barrier()
        return gradients[0] * 1.0


def hook(_gradient: Any) -> None:
    """Wait on the second rank."""
    if dist.get_rank() == 1:
        time.sleep(0.04)


class Layer(paddle.nn.Linear):
    """A linear layer with a hook in its backward."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - Paddle's name
        """Return the output."""
        apply: Any = Late.apply
        output = apply(super().forward(input))
        output.register_hook(hook)
        return output


layer = Layer(64, 64)
model = paddle.DataParallel(layer)
optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
for _ in range(6):
    with model.no_sync():
        model(paddle.ones([2, 64])).mean().backward()
    model(paddle.ones([2, 64])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
Path(f"{os.environ['OUTPUT']}.{dist.get_rank()}").write_text(json.dumps(float(layer.weight.sum())))
