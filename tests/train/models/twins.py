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
from paddle import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

rank, nranks = (int(os.environ[f"PADDLE_TRAINER{name}"]) for name in ("_ID", "S_NUM"))
# A script may use the CPU for something else: with ELSEWHERE it does for a while.
cpu = partial(paddle.base.framework._dygraph_place_guard, paddle.CPUPlace())
elsewhere: Any = cpu if os.environ.get("ELSEWHERE") else nullcontext


def mlp(inputs: int = 8, hidden: int = 6, outputs: int = 4) -> Any:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def twins(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return two results of MAKE, with the same weights on every rank."""
    paddle.seed(5)
    net, alone = make(), make()
    alone.set_state_dict(net.state_dict())
    return net, alone


def batches(ranks: list[int], *shape: int) -> Iterator[Any]:
    """Yield float32 batches without end: SHAPE for each of RANKS, along the first axis."""
    generators = [np.random.RandomState(rank) for rank in ranks]
    while True:
        parts = [generator.randn(*shape) for generator in generators]
        yield paddle.to_tensor(np.concatenate(parts).astype("float32"))


def weights(*nets: Any) -> list[float]:
    """Return the values of all parameters of NETS."""
    # numpy has no bfloat16.
    arrays = [parameter.cast("float64").numpy() for net in nets for parameter in net.parameters()]
    return [float(value) for array in arrays for value in array.ravel()]


def once(model: Any, batch: Any) -> None:
    (model(batch) ** 2).mean().backward()


def train(
    model: Any,
    drawn: Iterator[Any],
    steps: int,
    before: Callable[[int], object] = lambda _: None,
    kind: Any = paddle.optimizer.SGD,
) -> list[float]:
    """Train MODEL with what is DRAWN; call BEFORE with each step's number; return the weights."""
    optimizer = kind(0.1, parameters=model.parameters())
    for step in range(1, steps + 1):
        before(step)
        once(model, next(drawn))
        optimizer.step()
        # Gradients become zeros, or None.
        optimizer.clear_grad(set_to_zero=step % 2 == 0)
    return weights(model)


def compare(
    make: Callable[[], Any], train_by: Callable[[Any, list[int]], Any], **options: Any
) -> dict[str, Any]:
    """Return the weights of TRAIN_BY with all ranks, and in one process with their batches.

    It is called with a model made by MAKE, and the ranks whose batches it takes. OPTIONS are
    DataParallel's.
    """
    net, alone = twins(make)
    shared = train_by(paddle.DataParallel(net, **options), [rank])
    return {"weights": shared, "alone": train_by(alone, [*range(nranks)])}


class ByHand:
    """SGD for one process, with the mean of the gradients of MERGED steps."""

    def __init__(self, rate: float, parameters: list[Any], merged: int = 1) -> None:
        self.rate, self.parameters, self.merged = rate / merged, parameters, merged
        self.sums: list[Any] = [0.0] * len(parameters)
        self.steps = 0

    def step(self) -> None:
        """Add up the gradients; update with the last ones."""
        self.steps += 1
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.sums[place] = self.sums[place] + parameter.grad.numpy()
            if self.steps % self.merged == 0:
                parameter.set_value(parameter.numpy() - self.rate * self.sums[place])
                self.sums[place] = 0.0

    def clear_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self.parameters:
            parameter.clear_gradient()


def write(report: object) -> None:
    """Write what this rank has to REPORT."""
    Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
