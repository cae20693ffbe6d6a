"""Trains models with parameters that change without training.

Reports for each model whether the comparison found a difference, and in what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import nn
from twins import rank, write

if TYPE_CHECKING:
    from collections.abc import Callable

paddle.distributed.init_parallel_env()


def thawed(net: Any) -> Any:
    """Freeze all of NET, then unfreeze it, as fine-tuning does layer by layer."""
    for value in (True, False):
        for parameter in net.parameters():
            parameter.stop_gradient = value
    return net


def normed() -> Any:
    return thawed(
        nn.Sequential(nn.Conv1D(1, 3, 3), nn.BatchNorm1D(3), nn.Flatten(), nn.Linear(18, 2))
    )


class Running(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Subtracts a running mean of its input, which it keeps in its own way."""

    def __init__(self, keep: Callable[[Any, Any], object], *, learns: bool) -> None:
        super().__init__()
        self.keep, self.learns = keep, learns
        self.seen, self.last = self.create_parameter([8]), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        with paddle.no_grad():
            self.keep(self.seen, self.seen * 0.9 + x.mean(0) * 0.1)
        seen: Any = self.seen
        return self.last(x - (seen if self.learns else seen.detach()))


def running(keep: Callable[[Any, Any], object], *, learns: bool = True) -> Any:
    return thawed(Running(keep, learns=learns))


class Begun(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Initialises its parameters from the first rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.is_new, self.scale = True, self.create_parameter([8])
        self.last = nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        if self.is_new:
            self.is_new = False
            self.scale.set_value(1 / (x.abs().mean(0) + 1))
        return self.last(x * self.scale)


KINDS: dict[str, Callable[[], Any]] = {
    "normed": normed,
    "set": lambda: running(lambda kept, value: kept.set_value(value)),
    "aside": lambda: running(lambda kept, value: kept.set_value(value), learns=False),
}


class Clearing(paddle.optimizer.SGD):  # type: ignore[misc, unused-ignore]
    """Clears gradients in each step."""

    def step(self) -> None:
        """Update, and clear."""
        super().step()
        self.clear_grad(set_to_zero=False)


def train(net: Any, after: Callable[[Any, int], None] | None = None) -> str:
    """Train NET for four updates, each followed by AFTER; return the check's report."""
    # Paddle's own reducer must be told that some parameters have no gradients.
    model = paddle.DataParallel(net, find_unused_parameters=True)
    optimizer = Clearing(0.1, parameters=model.parameters())
    numbers = np.random.RandomState(rank)
    shape = [4, 1, 8] if isinstance(net, nn.Sequential) else [4, 8]
    try:
        for step in range(4):
            x = paddle.to_tensor(numbers.randn(*shape).astype("float32"))
            (model(x) ** 2).mean().backward()
            optimizer.step()
            if after is not None:
                after(net, step)
    except RuntimeError as error:
        return str(error)
    return ""


def spoil(net: Any, step: int) -> None:
    """Let one rank diverge from the second update on."""
    if rank == 1 and step == 1:
        net[0].weight.set_value(net[0].weight + 1e-3)


report = {}
for name, make in KINDS.items():
    paddle.seed(5)
    report[name] = train(make())
report["begun"] = train(Begun())
report["spoilt"] = train(normed(), spoil)
write(report)
