"""Trains models with odd later backwards.

Reports the weights beside those of one process with the batches of all ranks, and the errors of
those that cannot be trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from twins import batches, rank, twins, weights, write

if TYPE_CHECKING:
    from collections.abc import Callable

LATE, UPDATES = 5, 8
paddle.distributed.init_parallel_env()


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Two layers and a matrix between them, which can be used in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)
        self.weight = self.create_parameter([6, 6])

    def middle(self, x: Any, way: str = "") -> Any:
        """Multiply by the matrix, or by its transpose, which makes its gradient strided."""
        return (self.weight.T @ x.T).T if way == "strided" else x @ self.weight

    def forward(self, x: Any, way: str = "") -> Any:
        first = self.first
        x = paddle.tanh((first.weight.T @ x.T).T + first.bias if way == "turned" else first(x))
        if way == "raised":
            x.register_hook(_raise)
        if way == "twice":
            x = recompute(self.middle, x)
            return self.last(recompute(self.middle, x))
        return self.last(x if way == "left_out" else self.middle(x, way))


class BadGradientError(Exception):
    """An error that a script raises in a backward and catches."""


def _raise(_gradient: Any) -> None:
    raise BadGradientError


def fail(out: Any) -> None:
    """Run a backward of OUT that raises; the script continues with its next batch."""
    try:
        (out**2).mean().backward()
    except Exception as error:
        if "BadGradientError" not in repr(error):
            raise


def train(way: str, net: Any, model: Any, ranks: list[int], *, is_odd: Callable[[], bool]) -> Any:
    """Train; return the weights."""
    optimizer = paddle.optimizer.Momentum(0.1, parameters=net.parameters())
    drawn = batches(ranks, 4, 8)
    for update in range(1, UPDATES + 1):
        odd = way if update >= LATE and is_odd() else ""
        batch = next(drawn)
        if odd == "raised":
            fail(model(batch, odd))
            optimizer.clear_grad()
            odd = ""
        if way == "bare" and rank == 0:
            # As to show what a net looks at.
            (net(batch) ** 2).mean().backward()
            optimizer.clear_grad()
        if way == "frozen":
            # The critic of a GAN is frozen like this for a while.
            for parameter in net.parameters():
                parameter.stop_gradient = True
            model(batch)
            batch.stop_gradient = False
            (model(batch) ** 2).mean().backward()
            for parameter in net.parameters():
                parameter.stop_gradient = False
        out = (model or paddle.DataParallel(net))(batch.detach(), odd)
        (out**2).mean().backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=update % 2 == 0)
    return weights(net)


def trained(way: str, *, is_odd: Callable[[], bool] = lambda: True) -> dict[str, Any]:
    """Train with all ranks, and in one process."""
    net, alone = twins(Net)
    # Or each forward makes a model, which goes before the backward.
    model = None if way == "dropped" else paddle.DataParallel(net)
    actual = train(way, net, model, [rank], is_odd=is_odd)
    return {"weights": actual, "alone": train(way, alone, alone, [0, 1], is_odd=is_odd)}


report: dict[str, Any] = {way: trained(way) for way in ("strided", "frozen", "bare", "dropped")}
report["strided here"] = trained("strided", is_odd=lambda: rank == 1)


def why_not(way: str) -> str:
    """Return the error that stops the training."""
    try:
        trained(way)
    except Exception as error:
        return str(error)
    return ""


write([report, {way: why_not(way) for way in ("raised", "left_out", "twice", "turned")}])
