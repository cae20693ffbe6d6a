"""Trains with scripts that write weights, or read gradients, between the backwards of an update.

Reports the weights of those that can be merged, beside those of one process with all batches of an
update at once; and what the others were stopped with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn
from twins import batches, rank, twins, weights, write  # type: ignore[import-not-found, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Callable

MICRO, UPDATES, RATE = 2, 4, 0.1
paddle.distributed.init_parallel_env()


def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


class Plain:
    """An optimizer of which nobody knows, for the one process."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        """Update as SGD does."""
        for each in self.parameters:
            each.set_value(each - RATE * each.grad)

    def clear_grad(self) -> None:
        """Clear the gradients."""
        for each in self.parameters:
            each.clear_gradient()


def once(model: Any, batch: Any) -> None:
    (model(batch) ** 2).mean().backward()


def perturb(parameters: list[Any]) -> list[Any]:
    """Move the weights along their gradients; return the way back."""
    steps = [0.1 * each.grad for each in parameters]
    for each, step in zip(parameters, steps, strict=True):
        each.set_value(each + step)
    return steps


def restore(parameters: list[Any], steps: list[Any]) -> None:
    for each, step in zip(parameters, steps, strict=True):
        each.set_value(each - step)


def sam(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Take the gradients of perturbed weights."""
    once(model, batch)
    steps = perturb(parameters)
    optimizer.clear_grad()
    once(model, batch)
    restore(parameters, steps)
    optimizer.step()
    optimizer.clear_grad()


def both(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Add those of perturbed weights, and decay the weights there."""
    once(model, batch)
    with paddle.no_grad():
        for each in parameters:
            each.scale_(0.99)
    once(model, batch)
    optimizer.step()
    optimizer.clear_grad()


def extragradient(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Make a step, and the real one from where that began."""
    old = [each.detach().clone() for each in parameters]
    once(model, batch)
    optimizer.step()
    optimizer.clear_grad()
    once(model, batch)
    for each, weight in zip(parameters, old, strict=True):
        each.set_value(weight)
    optimizer.step()
    optimizer.clear_grad()


def composed(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Put the gradients of two losses together in place."""
    once(model, batch)
    first = [each.grad.clone() for each in parameters]
    optimizer.clear_grad()
    once(model, batch + 1)
    with paddle.no_grad():
        for each, gradient in zip(parameters, first, strict=True):
            each.grad.subtract_(0.5 * gradient)
    optimizer.step()
    optimizer.clear_grad()


def decayed(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Decay the weights after each step."""
    once(model, batch)
    optimizer.step()
    optimizer.clear_grad()
    for each in parameters:
        each.set_value(0.99 * each)


def swapped(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Evaluate with other weights after each step, and go back."""
    once(model, batch)
    optimizer.step()
    optimizer.clear_grad()
    kept = [each.detach().clone() for each in parameters]
    for each in parameters:
        each.set_value(0.5 * each)
    with paddle.no_grad():
        model(batch)
    for each, weight in zip(parameters, kept, strict=True):
        each.set_value(weight)


def frozen(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Freeze the model for a while after each step, as a GAN does."""
    once(model, batch)
    optimizer.step()
    optimizer.clear_grad()
    for each in parameters:
        each.stop_gradient = True
    batch.stop_gradient = False
    once(model, batch)
    batch.stop_gradient = True
    for each in parameters:
        each.stop_gradient = False


def train(
    way: Callable[[Any, Any, Any, list[Any]], None],
    net: Any,
    model: Any,
    ranks: list[int],
    micro: int,
) -> list[float]:
    """Train in batches of MICRO; return the weights."""
    kind: Any = paddle.optimizer.SGD if micro == 1 else lambda _, parameters: Plain(parameters)
    optimizer = kind(RATE, parameters=net.parameters())
    drawn = [batches([each], 4, 8) for each in ranks]
    for _ in range(0, MICRO * UPDATES, micro):
        rows = [next(of_rank) for _ in range(micro) for of_rank in drawn]
        way(model, paddle.concat(rows), optimizer, net.parameters())
    return list(weights(net))


report: dict[str, Any] = {}
for way in (swapped, frozen):
    net, alone = twins(mlp)
    found = train(way, net, paddle.DataParallel(net), [rank], 1)
    report[way.__name__] = {"weights": found, "alone": train(way, alone, alone, [0, 1], MICRO)}


def stop(way: Callable[[Any, Any, Any, list[Any]], None]) -> str:
    """Return what WAY is stopped with."""
    net = mlp()
    try:
        train(way, net, paddle.DataParallel(net), [rank], 1)
    except RuntimeError as error:
        return str(error)
    return ""


ways = (sam, both, extragradient, composed, decayed)
write([report, {way.__name__: stop(way) for way in ways}])
