"""Two models of the same weights: one is trained by all ranks, one alone with all their batches."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

rank = int(os.environ["PADDLE_TRAINER_ID"])
# A script may choose the CPU for other things: with ELSEWHERE it does for a while.
cpu = partial(paddle.base.framework._dygraph_place_guard, paddle.CPUPlace())
elsewhere: Any = cpu if os.environ.get("ELSEWHERE") else nullcontext


def twins(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return two of what MAKE makes, with the same weights in every rank."""
    paddle.seed(5)
    net, alone = make(), make()
    alone.set_state_dict(net.state_dict())
    return net, alone


def batches(ranks: list[int], *shape: int) -> Iterator[Any]:
    """Yield float32 batches without end: SHAPE for each of RANKS, along the first axis."""
    numbers = [np.random.RandomState(each) for each in ranks]
    while True:
        parts = [each.randn(*shape) for each in numbers]
        yield paddle.to_tensor(np.concatenate(parts).astype("float32"))


def weights(*nets: Any) -> list[float]:
    """Return the values of all parameters of NETS."""
    # numpy has no bfloat16.
    found = [each.cast("float64").numpy() for net in nets for each in net.parameters()]
    return [float(value) for array in found for value in array.ravel()]


def train(
    model: Any, drawn: Iterator[Any], steps: int, before: Callable[[], object] | None = None
) -> list[float]:
    """Train MODEL with what is DRAWN; call BEFORE, if any, before each step; return the weights."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for _ in range(steps):
        if before is not None:
            before()
        (model(next(drawn)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return weights(model)


def write(report: object) -> None:
    """Write what this rank has to REPORT."""
    Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
