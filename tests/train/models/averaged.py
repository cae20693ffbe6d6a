"""A script that averages gradients itself in each micro-step, without a data-parallel model.

Reports the weights beside those of one process, which gets all batches of an update at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils import hybrid_parallel_util
from twins import ByHand, batches, mlp, once, rank, twins, weights, write

if TYPE_CHECKING:
    from collections.abc import Callable

MERGED, UPDATES, RATE = 4, 2, 0.1
dist.init_parallel_env()


def plainly(parameters: list[Any]) -> None:
    """Average each gradient."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad.scale_(0.5)


def by_fleet(parameters: list[Any]) -> None:
    """Let fleet average all gradients, as its hybrid optimizers do."""
    average: Any = hybrid_parallel_util.fused_allreduce_gradients
    average(parameters, None)


def by_raw_gradients(parameters: list[Any]) -> None:
    """Replace each gradient by its average."""
    for parameter in parameters:
        gradient = parameter._grad_ivar().clone()
        dist.all_reduce(gradient)
        parameter._set_grad_ivar(gradient.scale_(0.5))


def train(
    net: Any, ranks: list[int], optimizer: Any, average: Callable[[list[Any]], None]
) -> list[float]:
    """Train in micro-steps; return the weights."""
    drawn = batches(ranks, 4, 8)
    for _ in range(MERGED * UPDATES):
        once(net, next(drawn))
        with paddle.no_grad():
            average(net.parameters())
        optimizer.step()
        optimizer.clear_grad()
    return list(weights(net))


report = {}
for way in (plainly, by_fleet, by_raw_gradients):
    net, alone = twins(mlp)
    sgd = paddle.optimizer.SGD(RATE, parameters=net.parameters())
    by_hand = ByHand(RATE, alone.parameters(), MERGED)
    report[way.__name__] = {
        "weights": train(net, [rank], sgd, way),
        "alone": train(alone, [0, 1], by_hand, lambda _: None),
    }
write(report)
