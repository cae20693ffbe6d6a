"""The common parts of all trainings of `kinds.py`: options, data, steps and report."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from counting import Meter
from paddle import nn
from paddle.optimizer import Momentum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UPDATES, MICRO, ROWS = 3, 4, 24

parser = argparse.ArgumentParser()
# The script's own way to a larger batch; and the divisor of each loss, if it is another.
parser.add_argument("--accumulate", type=int, required=True)
parser.add_argument("--divide", type=int)
parser.add_argument("--kinds", default="")
# Kinds that one process trains alone, with the batches of all ranks.
parser.add_argument("--alone", default="")
parser.add_argument("--checkpoint", type=Path, default=Path())
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

rank, world = (int(os.environ[f"PADDLE_TRAINER{name}"]) for name in ("_ID", "S_NUM"))
report: dict[str, Any] = {}
# The trainings that one process can also run alone, by the name of the kind; `train_kinds.names`
# reads these names in the source.
KINDS: dict[str, Callable[[], None]] = {}


def trained(*shape: int, **more: Any) -> Callable[[Any], Any]:
    """Register the decorated class as a kind, trained by Momentum with batches of SHAPE."""

    def register(made: Any) -> Any:
        name = made.__name__.lower()

        def train() -> None:
            paddle.seed(5)
            net = made()
            learn(name, net, Momentum(0.05, parameters=net.parameters()), batches(*shape), **more)

        KINDS[name] = train
        return made

    return register


def batches(*shape: int, updates: int = UPDATES) -> Iterator[Any]:
    """Return this rank's rows of batches that are the same for any number of ranks."""
    numbers = np.random.RandomState(3)
    for _ in range(updates * MICRO):
        rows = numbers.randn(ROWS, *shape).astype("float32")
        yield paddle.to_tensor(np.split(rows, world)[rank])


def words(count: int) -> Iterator[Any]:
    numbers = np.random.RandomState(4)
    for _ in range(UPDATES * MICRO):
        rows = numbers.randint(0, count, (ROWS, 5))
        yield paddle.to_tensor(np.split(rows, world)[rank])


def parallel(net: Any, **arguments: Any) -> Any:
    """Return NET as a data-parallel model, or NET itself where one process trains alone."""
    if world > 1:
        return paddle.DataParallel(net, **arguments)
    # Scripts call this, too.
    net.__dict__["no_sync"] = contextlib.nullcontext
    return net


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Let rank 0 train alone; its reports then get the prefix "alone"."""
    global rank, world, report  # noqa: PLW0603 - what a kind is told
    kept = rank, world, report
    rank, world, report = 0, 1, {}
    try:
        yield
    finally:
        alone, (rank, world, report) = report, kept
        report |= {f"alone {name}": result for name, result in alone.items()}


def mlp(width: int = 8) -> Any:
    paddle.seed(5)
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )


def weights(net: Any, *, running: bool = False) -> list[float]:
    """Return the values of the parameters of NET, or of its RUNNING statistics."""
    return [
        float(value)
        for name, parameter in net.named_parameters()
        for value in parameter.numpy().ravel()
        if name.endswith(("_mean", "_variance")) is running
    ]


def say(name: str, nets: list[Any], meter: Meter, **more: Any) -> None:
    """Report the weights of NETS, and the counts of METER."""
    trained = [
        parameter for net in nets for parameter in net.parameters() if not parameter.stop_gradient
    ]
    report[name] = {
        # Roughly the order in which backward computes them.
        "sizes": [parameter.size * 4 for parameter in trained][::-1],
        "weights": [value for net in nets for value in weights(net)],
        "running": [value for net in nets for value in weights(net, running=True)],
        **meter.report(),
        **more,
    }


def learn(
    name: str,
    net: Any,
    optimizer: Any,
    data: Iterator[Any],
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    accumulate: int = 1,
    no_sync: bool = False,
    before: Callable[[int], None] | None = None,
    after: Callable[[], None] | None = None,
    begin: int = 0,
    **arguments: Any,
) -> None:
    """Train NET; call BEFORE each micro-step, and AFTER each step of OPTIMIZER."""
    model = parallel(net, **arguments)
    steps = accumulate * options.accumulate
    meter = Meter()
    rate = optimizer._learning_rate
    for number, batch in enumerate(data):
        if number < begin:
            continue
        if before is not None:
            before(number)
        is_due = (number + 1) % steps == 0
        with meter.running(), contextlib.ExitStack() as stack:
            if no_sync and not is_due:
                stack.enter_context(model.no_sync())
            value = (model(batch) ** 2).mean() if loss is None else loss(model, batch)
            (value / (options.divide or steps)).backward()
        if is_due:
            optimizer.step()
            optimizer.clear_grad()
            if not isinstance(rate, float):
                rate.step()
            if after is not None:
                after()
    say(name, [net], meter)
