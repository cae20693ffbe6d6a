"""Trains several models that step at different rates, each merged by itself.

Reports their weights beside those of one process, which gets the batches of all ranks and adds up
the gradients of each model's own steps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn
from twins import ByHand, batches, mlp, rank, twins, weights, write

if TYPE_CHECKING:
    from collections.abc import Callable

MERGED, RATE = 2, 0.05
# After so many, models that step at rates of 1, 2 and 3 have all made several merged updates, and
# make the last of them in the same step.
STEPS = 12
paddle.distributed.init_parallel_env()


def apart(models: list[Any], optimizers: list[Any], draw: Callable[[], Any]) -> None:
    """Run the models at rates of their own."""
    for number in range(STEPS):
        for rate, (model, optimizer) in enumerate(zip(models, optimizers, strict=True), 1):
            if number % rate == 0:
                (model(draw()) ** 2).mean().backward()
                optimizer.step()
                optimizer.clear_grad()


def together(
    models: list[Any],
    optimizers: list[Any],
    draw: Callable[[], Any],
    *,
    clears_all: bool = False,
) -> None:
    """Run all models in one backward; each collects the gradients of several before it steps."""
    for number in range(1, STEPS + 1):
        losses: list[Any] = [(model(draw()) ** 2).mean() for model in models]
        total: Any = sum(losses[1:], losses[0])
        total.backward()
        for rate, optimizer in enumerate(optimizers, 1):
            if number % rate == 0:
                optimizer.step()
                if not clears_all:
                    optimizer.clear_grad()
        for optimizer in optimizers if clears_all else ():
            optimizer.clear_grad()


def cleared(models: list[Any], optimizers: list[Any], draw: Callable[[], Any]) -> None:
    """Clear the gradients of all models after each backward, whoever has stepped."""
    together(models, optimizers, draw, clears_all=True)


class Parts(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Several models in one; a forward uses one of them."""

    def __init__(self, models: Any) -> None:
        super().__init__()
        self.models = nn.LayerList(list(models))

    def forward(self, number: int, batch: Any) -> Any:
        return self.models[number](batch)


class Part:
    """One of the models in MODEL, which ranks share."""

    def __init__(self, model: Any, number: int) -> None:
        self.model, self.number = model, number

    def __call__(self, batch: Any) -> Any:
        return self.model(self.number, batch)

    def parameters(self) -> list[Any]:
        """Return the parameters of this one."""
        return list(self.model._layers.models[self.number].parameters())


WAYS = {
    apart: (2, 3, 4),
    together: (2, 3, 4),
    cleared: (2, 3, 4),
}
report: dict[str, Any] = {}


def train(way: Any, models: Any, optimizers: list[Any], drawn: Any, name: str) -> None:
    """Train MODELS; if that is refused, report the error under NAME."""
    try:
        way(list(models), optimizers, lambda: next(drawn))
    except RuntimeError as error:
        report[name]["error"] = str(error)


def compare(way: Any, shape: tuple[int, ...], name: str, *, is_one: bool) -> None:
    """Train models of SHAPE in this WAY with all ranks, as one model if IS_ONE, and alone."""
    nets, alone = zip(*(twins(partial(mlp, outputs=wide)) for wide in shape), strict=True)
    report[name] = {}
    shared: list[Any] = [paddle.DataParallel(net) for net in nets] if not is_one else []
    if is_one:
        model = paddle.DataParallel(Parts(nets), find_unused_parameters=True)
        shared = [Part(model, number) for number in range(len(nets))]
    optimizers = [paddle.optimizer.SGD(RATE, parameters=net.parameters()) for net in nets]
    train(way, shared, optimizers, batches([rank], 4, 8), name)
    merging = [ByHand(RATE, net.parameters(), MERGED) for net in alone]
    train(way, alone, merging, batches([0, 1], 4, 8), name)
    report[name].update(weights=weights(*nets), alone=weights(*alone))


for way, shape in WAYS.items():
    compare(way, shape, way.__name__, is_one=False)
    compare(way, shape, f"{way.__name__} in one", is_one=True)
write(report)
