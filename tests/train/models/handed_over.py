"""Trains models that are plain at first; some of them not later.

Reports the weights beside those of one process with the batches of all ranks; and the number of
allreduces that went through Python in each update.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import paddle
from counting import Meter
from paddle import nn
from twins import batches, mlp, rank, twins, weights, write

LATE = 5
paddle.distributed.init_parallel_env()


class Turned(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Multiplies by a matrix; later by its transpose, whose gradient is strided."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([8, 8])

    def forward(self, x: Any, *, is_late: bool) -> Any:
        """Multiply X by the matrix."""
        return (self.weight.T @ x.T).T if is_late else x @ self.weight


def loss_of(out: Any) -> Any:
    return (out**2).mean()


def several(model: Any, batch: Any, *, is_late: bool, is_alone: bool) -> None:
    """Take two losses of one graph, later one after the other."""
    out = model(batch)
    if is_late and not is_alone:
        loss_of(out).backward(retain_graph=True)
        loss_of(out + 1).backward()
    else:
        (loss_of(out) + loss_of(out + 1)).backward()


def accumulated(model: Any, batch: Any, *, is_late: bool, is_alone: bool) -> None:
    """Later keep the gradients of one half of the batch local until the other half is averaged."""
    half = batch.shape[0] // 2
    if is_late and not is_alone:
        with model.no_sync():
            (loss_of(model(batch[:half])) / 2).backward()
        (loss_of(model(batch[half:])) / 2).backward()
    else:
        loss_of(model(batch)).backward()


def probed(model: Any, batch: Any, *, is_late: bool, is_alone: bool) -> None:
    """Later one rank trains a model of its own between forward and backward."""
    out = model(batch)
    if is_late and not is_alone and rank == 0:
        loss_of(nn.Linear(4, 2)(out.detach())).backward()
    loss_of(out).backward()


def turned(model: Any, batch: Any, *, is_late: bool, is_alone: bool) -> None:
    """Later add several strided gradients up."""
    half = batch.shape[0] // 2
    for place in (0, half):
        with nullcontext() if is_alone or place else model.no_sync():
            out = model(batch[place : place + half], is_late=is_late)
            loss_of(out).backward(retain_graph=True)
            if is_late:
                loss_of(out + 1).backward()


def plain_steps(model: Any, batch: Any, **_: bool) -> None:
    """Run one backward of one forward."""
    loss_of(model(batch)).backward()


def train(name: str, net: Any, model: Any, ranks: list[int]) -> dict[str, Any]:
    """Train; return the weights, and the number of allreduces in each update."""
    ways = {way.__name__: way for way in (several, accumulated, probed, turned)}
    way = ways.get(name, plain_steps)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=net.parameters())
    drawn, meter = batches(ranks, 4, 8), Meter()
    for step in range(1, 9):
        if step == LATE:
            for parameter in net.parameters():
                parameter.stop_gradient = False
        with meter.running():
            way(model, next(drawn), is_late=step >= LATE, is_alone=len(ranks) > 1)
            optimizer.step()
        # Gradients become zeros, or None.
        optimizer.clear_grad(set_to_zero=step % 2 == 0)
    return {"weights": weights(net), "allreduces": meter.allreduces}


report = {}
# All of them stay alive, and are counted.
models = []
for name in ("plain", "several", "accumulated", "thawed", "probed", "turned"):
    net, alone = twins(Turned if name == "turned" else mlp)
    if name == "thawed":
        for model in (net, alone):
            model[0].weight.stop_gradient = True
    models.append(paddle.DataParallel(net))
    report[name] = train(name, net, models[-1], [rank])
    report[name]["alone"] = train(name, alone, alone, [0, 1])["weights"]
write(report)
