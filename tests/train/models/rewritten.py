"""Trains by scripts that write weights, or read gradients, between the backwards of an update.

Reports the weights of those that can be merged, beside those of one process with all batches of an
update at once; and the errors that stopped the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from twins import ByHand, batches, mlp, once, rank, twins, weights, write

if TYPE_CHECKING:
    from collections.abc import Callable

MICRO, UPDATES, RATE = 2, 4, 0.1
paddle.distributed.init_parallel_env()


def perturb(parameters: list[Any]) -> list[Any]:
    """Move the weights along their gradients; return the steps."""
    steps = [0.1 * parameter.grad for parameter in parameters]
    for parameter, step in zip(parameters, steps, strict=True):
        parameter.set_value(parameter + step)
    return steps


def restore(parameters: list[Any], steps: list[Any]) -> None:
    for parameter, step in zip(parameters, steps, strict=True):
        parameter.set_value(parameter - step)


def sam(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Use the gradients at perturbed weights."""
    once(model, batch)
    steps = perturb(parameters)
    optimizer.clear_grad()
    once(model, batch)
    restore(parameters, steps)
    optimizer.step()
    optimizer.clear_grad()


def composed(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Combine the gradients of two losses in place."""
    once(model, batch)
    first = [parameter.grad.clone() for parameter in parameters]
    optimizer.clear_grad()
    once(model, batch + 1)
    with paddle.no_grad():
        for parameter, gradient in zip(parameters, first, strict=True):
            parameter.grad.subtract_(0.5 * gradient)
    optimizer.step()
    optimizer.clear_grad()


def decayed(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Decay the weights after each step."""
    once(model, batch)
    optimizer.step()
    optimizer.clear_grad()
    for parameter in parameters:
        parameter.set_value(0.99 * parameter)


def swapped(model: Any, batch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Evaluate with other weights after each step, and restore them."""
    once(model, batch)
    optimizer.step()
    optimizer.clear_grad()
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.set_value(0.5 * parameter)
    with paddle.no_grad():
        model(batch)
    for parameter, weight in zip(parameters, kept, strict=True):
        parameter.set_value(weight)


def train(
    way: Callable[[Any, Any, Any, list[Any]], None],
    net: Any,
    model: Any,
    ranks: list[int],
    optimizer: Any,
) -> list[float]:
    """Train in micro-steps; return the weights."""
    drawn = batches(ranks, 4, 8)
    for _ in range(MICRO * UPDATES):
        way(model, next(drawn), optimizer, net.parameters())
    return list(weights(net))


def train_shared(way: Callable[[Any, Any, Any, list[Any]], None], net: Any) -> list[float]:
    """Train NET by all ranks."""
    optimizer = paddle.optimizer.SGD(RATE, parameters=net.parameters())
    return train(way, net, paddle.DataParallel(net), [rank], optimizer)


report: dict[str, Any] = {}
for way in (swapped,):
    net, alone = twins(mlp)
    by_hand = ByHand(RATE, alone.parameters(), MICRO)
    report[way.__name__] = {
        "weights": train_shared(way, net),
        "alone": train(way, alone, alone, [0, 1], by_hand),
    }


def stop(way: Callable[[Any, Any, Any, list[Any]], None]) -> str:
    """Return the error that stops WAY."""
    try:
        train_shared(way, mlp())
    except RuntimeError as error:
        return str(error)
    return ""


ways = (sam, composed, decayed)
write([report, {way.__name__: stop(way) for way in ways}])
