"""Trains with several forwards or backwards in one update.

Reports the weights beside those of one process, which gets the batches of all ranks in one
backward; and the number of allreduces in the last update.
"""

from __future__ import annotations

from typing import Any

import paddle
from counting import Meter
from twins import batches, mlp, rank, twins, weights, write

paddle.distributed.init_parallel_env()


def loss_of(out: Any) -> Any:
    return (out**2).mean()


def retain(model: Any, batch: Any, _next_batch: Any) -> None:
    """Take two losses of one graph, one after the other."""
    out = model(batch)
    loss_of(out).backward(retain_graph=True)
    loss_of(out + 1).backward()


def retain_at_once(model: Any, batch: Any, _next_batch: Any) -> None:
    """Take the same losses in one backward."""
    out = model(batch)
    (loss_of(out) + loss_of(out + 1)).backward()


def accumulate(model: Any, batch: Any, next_batch: Any) -> None:
    """Keep the gradients of a micro-batch local until the next one is averaged."""
    with model.no_sync():
        loss_of(model(batch)).backward()
    loss_of(model(next_batch)).backward()


def cross(model: Any, batch: Any, next_batch: Any) -> None:
    """Run both forwards before both backwards."""
    first, second = loss_of(model(batch)), loss_of(model(next_batch))
    first.backward()
    second.backward()


def look_on(model: Any, batch: Any, next_batch: Any) -> None:
    """Run a forward under `no_sync` before the backward of one that is averaged."""
    first = model(batch)
    with model.no_sync():
        second = model(next_batch)
    (loss_of(first) + loss_of(second)).backward()


def at_once(model: Any, batch: Any, next_batch: Any) -> None:
    """Take both micro-batches in one backward."""
    (loss_of(model(batch)) + loss_of(model(next_batch))).backward()


def train(way: Any, model: Any, ranks: list[int]) -> int:
    """Train in this WAY; return the number of allreduces in the last update."""
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    drawn, meter = batches(ranks, 4, 8), Meter()
    for step in range(4):
        with meter.running():
            way(model, next(drawn), next(drawn))
            optimizer.step()
        # Gradients become zeros, or None.
        optimizer.clear_grad(set_to_zero=step != 1)
    return int(meter.allreduces[-1])


report = {}
WAYS = {retain: retain_at_once, accumulate: at_once, cross: at_once, look_on: at_once}
for way, whole in WAYS.items():
    net, alone = twins(mlp)
    made = train(way, paddle.DataParallel(net), [rank])
    train(whole, alone, [0, 1])
    report[way.__name__] = {"weights": weights(net), "alone": weights(alone), "allreduces": made}
write(report)
