"""Averages gradients over the ranks by itself in each micro-step, without a data-parallel model.

Reports the weights beside those of one process, which gets all batches of an update at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.utils import hybrid_parallel_util
from twins import batches, rank, twins, weights, write  # type: ignore[import-not-found, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Callable

MERGED, UPDATES, RATE = 4, 2, 0.1
dist.init_parallel_env()


def plainly(parameters: list[Any]) -> None:
    """Average each gradient."""
    for each in parameters:
        dist.all_reduce(each.grad)
        each.grad.scale_(0.5)


def by_fleet(parameters: list[Any]) -> None:
    """Let fleet average all of them, as its hybrid optimizers do."""
    average: Any = hybrid_parallel_util.fused_allreduce_gradients
    average(parameters, None)


def by_raw_gradients(parameters: list[Any]) -> None:
    """Replace each gradient by one that was averaged."""
    for each in parameters:
        gradient = each._grad_ivar().clone()
        dist.all_reduce(gradient)
        each._set_grad_ivar(gradient.scale_(0.5))


def train(net: Any, ranks: list[int], average: Callable[[list[Any]], None] | None) -> Any:
    """Train in micro-steps if gradients are averaged, in whole batches by hand else."""
    optimizer = paddle.optimizer.SGD(RATE, parameters=net.parameters())
    drawn = [batches([each], 4, 8) for each in ranks]
    micro = MERGED if average is None else 1
    for _ in range(0, MERGED * UPDATES, micro):
        rows = [next(of_rank) for _ in range(micro) for of_rank in drawn]
        (net(paddle.concat(rows)) ** 2).mean().backward()
        if average is not None:
            with paddle.no_grad():
                average(net.parameters())
            optimizer.step()
            optimizer.clear_grad()
            continue
        for each in net.parameters():
            each.set_value(each - RATE * each.grad)
            each.clear_gradient()
    return weights(net)


report = {}
for way in (plainly, by_fleet, by_raw_gradients):
    net, alone = twins(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)))
    found = train(net, [rank], way)
    report[way.__name__] = {"weights": found, "alone": train(alone, [0, 1], None)}
write(report)
