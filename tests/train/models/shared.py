"""Trains layers that are in two data-parallel models at once.

Reports the weights beside those that one process gets over the batches of all ranks.
"""

import gc
import weakref
from typing import Any

import paddle
from paddle import nn
from twins import batches, rank, write

paddle.distributed.init_parallel_env()


def nets() -> "tuple[Any, Any]":
    """Return two nets with the same first layer."""
    paddle.seed(5)
    first = nn.Linear(8, 6)
    return nn.Sequential(first, nn.Linear(6, 4)), nn.Sequential(first, nn.Linear(6, 2))


def at_once(first: Any, second: Any, batch: Any, _optimizer: Any) -> None:
    """Take both losses in one backward."""
    ((first(batch) ** 2).mean() + (second(batch) ** 2).mean()).backward()


def apart(first: Any, second: Any, batch: Any, _optimizer: Any) -> None:
    """Take one loss after the other."""
    for model in (first, second):
        (model(batch) ** 2).mean().backward()


def in_turn(first: Any, second: Any, batch: Any, optimizer: Any) -> None:
    """Update with one loss, and then with the other."""
    for model in (first, second):
        (model(batch) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)


def train(way: Any, first: Any, second: Any, ranks: "list[int]") -> "list[float]":
    """Train in this WAY; return the weights."""
    parameters = {
        id(parameter): parameter for net in (first, second) for parameter in net.parameters()
    }
    optimizer = paddle.optimizer.Momentum(0.1, parameters=list(parameters.values()))
    drawn = batches(ranks, 4, 8)
    for _ in range(4):
        way(first, second, next(drawn), optimizer)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    return [
        float(value) for parameter in parameters.values() for value in parameter.numpy().ravel()
    ]


report: dict[str, Any] = {}
for way in (at_once, apart, in_turn):
    models = [paddle.DataParallel(net) for net in nets()]
    weights = train(way, models[0], models[1], [rank])
    report[way.__name__] = {"weights": weights, "alone": train(way, *nets(), [0, 1])}
# The same nets in new models, as in a script that trains twice.
first, second = nets()
weights = []
for _ in range(2):
    models = [paddle.DataParallel(net) for net in (first, second)]
    weights = train(apart, models[0], models[1], [rank])
first, second = nets()
train(apart, first, second, [0, 1])
report["again"] = {"weights": weights, "alone": train(apart, first, second, [0, 1])}
# A deleted model is freed at once, with its reducer, except for cycles, which Python collects.
model = paddle.DataParallel(nn.Linear(2, 2))
model(paddle.ones([1, 2])).sum().backward()
left = weakref.ref(model._reducer)
del model
report["gone"] = {"at_once": left() is None, "later": gc.collect() >= 0 and left() is None}
write(report)
