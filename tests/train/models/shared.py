"""Trains layers that are in two data-parallel models at once.

Reports the weights beside those that one process gets over the batches of all ranks.
"""

import gc
import weakref
from typing import Any

import paddle
from paddle import nn
from twins import batches, rank, write  # type: ignore[import-not-found, unused-ignore]

paddle.distributed.init_parallel_env()


def nets() -> "tuple[Any, Any]":
    """Return two nets with the same first layer."""
    paddle.seed(5)
    first = nn.Linear(8, 6)
    return nn.Sequential(first, nn.Linear(6, 4)), nn.Sequential(first, nn.Linear(6, 2))


def at_once(one: Any, other: Any, batch: Any, _optimizer: Any) -> None:
    """Take both losses in one backward."""
    ((one(batch) ** 2).mean() + (other(batch) ** 2).mean()).backward()


def apart(one: Any, other: Any, batch: Any, _optimizer: Any) -> None:
    """Take one loss after the other."""
    for each in (one, other):
        (each(batch) ** 2).mean().backward()


def in_turn(one: Any, other: Any, batch: Any, optimizer: Any) -> None:
    """Update with one loss, and then with the other."""
    for each in (one, other):
        (each(batch) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)


def train(way: Any, one: Any, other: Any, ranks: "list[int]") -> "list[float]":
    """Train in this WAY; return the weights."""
    found = {id(each): each for net in (one, other) for each in net.parameters()}
    optimizer = paddle.optimizer.Momentum(0.1, parameters=list(found.values()))
    drawn = batches(ranks, 4, 8)
    for _ in range(4):
        way(one, other, next(drawn), optimizer)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    return [float(value) for each in found.values() for value in each.numpy().ravel()]


report: dict[str, Any] = {}
for way in (at_once, apart, in_turn):
    models = [paddle.DataParallel(each) for each in nets()]
    weights = train(way, models[0], models[1], [rank])
    report[way.__name__] = {"weights": weights, "alone": train(way, *nets(), [0, 1])}
# The same nets in new models, as a script has it that trains twice.
one, other = nets()
weights = []
for _ in range(2):
    models = [paddle.DataParallel(each) for each in (one, other)]
    weights = train(apart, models[0], models[1], [rank])
one, other = nets()
train(apart, one, other, [0, 1])
report["again"] = {"weights": weights, "alone": train(apart, one, other, [0, 1])}
# What the script lets go is gone at once, its reducer, too, but for what Python itself must find.
model = paddle.DataParallel(nn.Linear(2, 2))
model(paddle.ones([1, 2])).sum().backward()
left = weakref.ref(model._reducer)
del model
report["gone"] = {"at_once": left() is None, "later": gc.collect() >= 0 and left() is None}
write(report)
