"""Trains by scripts that modify gradients or weights themselves, in micro-steps that are merged.

Reports the weights of each beside those of one process, which gets all batches of an update at once
and updates by hand; or the error that stopped a script.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import nn
from twins import ByHand, batches, mlp, once, rank, twins, weights, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MICRO, UPDATES, RATE = 2, 3, 0.1
STEPS = 8
paddle.distributed.init_parallel_env()
# Batches that the script skips: the last one of an update, and the first one of another.
BAD = (1, 3)
new = partial(mlp, 6, 8, 6)


def rows(numbers: Sequence[int], ranks: list[int]) -> Any:
    """Return the rows of RANKS in the batches of NUMBERS."""
    seeds = [10 * number + rank for number in numbers for rank in ranks]
    parts = [np.random.RandomState(seed).randn(4, 6) for seed in seeds]
    return paddle.to_tensor(np.concatenate(parts).astype("float32"))


def twice(model: Any, batch: Any) -> None:
    """Make a second backward that adds to the gradients of the first."""
    once(model, batch)
    (model(batch + 1) ** 2).mean().backward()


def clipped(parameters: list[Any]) -> None:
    """Clip the averaged gradients by Paddle's functions."""
    nn.utils.clip_grad_norm_(parameters, 0.05)
    nn.utils.clip_grad_value_(parameters, 0.02)


def without_one(parameters: list[Any]) -> None:
    """Leave one parameter out."""
    parameters[1].clear_gradient()


def nothing(_parameters: list[Any]) -> None:
    """Do nothing."""


def by_new_ones(parameters: list[Any], _optimizer: Any) -> None:
    for parameter in parameters:
        parameter.grad = paddle.zeros_like(parameter)


def by_zeros(parameters: list[Any], _optimizer: Any) -> None:
    with paddle.no_grad():
        for parameter in parameters:
            parameter.grad.zero_()


def by_optimizer(_parameters: list[Any], optimizer: Any) -> None:
    optimizer.clear_grad()


KINDS: dict[str, tuple[Any, Any, Any, tuple[int, ...]]] = {
    "clipped_twice": (twice, clipped, by_new_ones, ()),
    "clipped": (once, clipped, by_zeros, ()),
    "without_one": (once, without_one, by_optimizer, ()),
    "skipped": (once, nothing, by_optimizer, BAD),
}


class Numbered(paddle.optimizer.SGD):  # type: ignore[misc, unused-ignore]
    """SGD whose step takes more, by names that are in fleetrun, too."""

    def step(self, *, owner: int, step: int) -> None:
        assert owner == rank
        assert step >= 0
        super().step()


class Halved(paddle.optimizer.lr.StepDecay):  # type: ignore[misc, unused-ignore]
    """A scheduler whose step calls that of its base."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)


def with_one_twice(net: Any) -> list[Any]:
    """Return the parameters of NET, one of them twice, as of two layers that share it."""
    return [*net.parameters(), net[0].weight]


def train(
    net: Any,
    backward: Callable[[Any, Any], None],
    change: Callable[[list[Any]], None],
    clear: Callable[[list[Any], Any], None],
    bad: tuple[int, ...],
) -> None:
    """Train NET as a script that knows nothing of merging."""
    model = paddle.DataParallel(net)
    optimizer = Numbered(RATE, parameters=with_one_twice(net))
    # As for another phase of the training.
    idle = paddle.optimizer.SGD(RATE, parameters=net.parameters())
    for number in range(MICRO * UPDATES + len(bad)):
        backward(model, rows([number], [rank]))
        if number in bad:
            optimizer.clear_grad()
            continue
        change(net.parameters())
        optimizer.step(owner=rank, step=number)
        clear(net.parameters(), optimizer)
    del idle


def large(bad: tuple[int, ...]) -> Iterator[Any]:
    """Yield all rows of each update."""
    good = [number for number in range(MICRO * UPDATES + len(bad)) if number not in bad]
    for begin in range(0, len(good), MICRO):
        yield rows(good[begin : begin + MICRO], [0, 1])


def adversaries(models: list[Any], optimizers: list[Any], draw: Callable[[], Any]) -> None:
    """Clear the critic's gradients before its backward, not after the generator's."""
    for _ in range(STEPS):
        batch = draw()
        optimizers[1].clear_grad()
        once(models[1], batch)
        (models[1](models[0](batch).detach()) - 1).square().mean().backward()
        optimizers[1].step()
        optimizers[0].clear_grad()
        once(models[1], models[0](batch))
        optimizers[0].step()


def apart(models: list[Any], optimizers: list[Any], draw: Callable[[], Any]) -> None:
    """Train the second model half as often as the first."""
    for number in range(STEPS):
        for rate, (model, optimizer) in enumerate(zip(models, optimizers, strict=True), 1):
            if number % rate == 0:
                once(model, draw())
                optimizer.step()
                optimizer.clear_grad()


def together(models: list[Any], optimizers: list[Any], draw: Callable[[], Any]) -> None:
    """Run both models in one backward, step one half as often, and clear all after each."""
    for number in range(1, STEPS + 1):
        first, second = ((model(draw()) ** 2).mean() for model in models)
        (first + second).backward()
        for rate, optimizer in enumerate(optimizers, 1):
            if number % rate == 0:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.clear_grad()


def swapped(models: list[Any], optimizers: list[Any], draw: Callable[[], Any]) -> None:
    """Evaluate with other weights after each step, and restore them."""
    for _ in range(STEPS):
        once(models[0], draw())
        optimizers[0].step()
        optimizers[0].clear_grad()
        kept = [parameter.detach().clone() for parameter in models[0].parameters()]
        for parameter in models[0].parameters():
            parameter.set_value(0.5 * parameter)
        with paddle.no_grad():
            models[0](draw())
        for parameter, weight in zip(models[0].parameters(), kept, strict=True):
            parameter.set_value(weight)


def sam(model: Any, optimizer: Any, number: int) -> None:
    """Use the gradients at perturbed weights."""
    once(model, rows([number], [rank]))
    steps = [0.1 * parameter.grad for parameter in model.parameters()]
    for parameter, step in zip(model.parameters(), steps, strict=True):
        parameter.set_value(parameter + step)
    optimizer.clear_grad()
    once(model, rows([number], [rank]))
    for parameter, step in zip(model.parameters(), steps, strict=True):
        parameter.set_value(parameter - step)
    optimizer.step()
    optimizer.clear_grad()


def decayed(model: Any, optimizer: Any, number: int) -> None:
    """Decay the weights after each step."""
    once(model, rows([number], [rank]))
    optimizer.step()
    optimizer.clear_grad()
    for parameter in model.parameters():
        parameter.set_value(0.99 * parameter)


def noised(model: Any, optimizer: Any, number: int) -> None:
    """Add noise to the gradients."""
    once(model, rows([number], [rank]))
    for place, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.grad + 0.01 * (place + 1)
    optimizer.step()
    optimizer.clear_grad()


def signs(model: Any, optimizer: Any, number: int) -> None:
    """Keep only the signs of the gradients, in place."""
    once(model, rows([number], [rank]))
    with paddle.no_grad():
        for parameter in model.parameters():
            paddle.assign(paddle.sign(parameter.grad), parameter.grad)
    optimizer.step()
    optimizer.clear_grad()


def written(model: Any, optimizer: Any, number: int) -> None:
    """Write the gradients by a method that leaves no trace of its own."""
    once(model, rows([number], [rank]))
    for parameter in model.parameters():
        parameter.grad.set_value(parameter.grad.numpy() / 2)
    optimizer.step()
    optimizer.clear_grad()


def capped(model: Any, optimizer: Any, number: int) -> None:
    """Halve the gradients by hand, in the third update for the first time, as if by a limit."""
    once(model, rows([number], [rank]))
    for parameter in model.parameters():
        parameter.grad = parameter.grad * (0.5 if number >= 2 * MICRO else 1.0)
    optimizer.step()
    optimizer.clear_grad()


def clipped_between(model: Any, optimizer: Any, number: int) -> None:
    """Clip the gradients before a second backward adds to them."""
    once(model, rows([number], [rank]))
    clipped(model.parameters())
    once(model, rows([number], [rank]))
    optimizer.step()
    optimizer.clear_grad()


def frozen_last(model: Any, optimizer: Any, number: int) -> None:
    """Freeze a weight in the last micro-step of each update."""
    weight = model.parameters()[0]
    weight.stop_gradient = number % MICRO == MICRO - 1
    once(model, rows([number], [rank]))
    optimizer.step()
    optimizer.clear_grad()


def thawed_late(model: Any, optimizer: Any, number: int) -> None:
    """Freeze a weight in the backward of the last micro-step only."""
    weight = model.parameters()[0]
    weight.stop_gradient = number % MICRO == MICRO - 1
    once(model, rows([number], [rank]))
    weight.stop_gradient = False
    optimizer.step()
    optimizer.clear_grad()


def written_late(model: Any, optimizer: Any, number: int) -> None:
    """Do so by a method that leaves no trace of its own."""
    if number >= 2 * MICRO:
        written(model, optimizer, number)
    else:
        capped(model, optimizer, number)


def in_turn(model: Any, optimizer: Any, number: int) -> None:
    """Train by a second optimizer, too."""
    once(model, rows([number], [rank]))
    if number == 0:
        model.second = paddle.optimizer.SGD(RATE, parameters=model.parameters())
    current = (optimizer, model.second)[number % 2]
    current.step()
    current.clear_grad()


class Outer(paddle.optimizer.SGD):  # type: ignore[misc, unused-ignore]
    """Steps another optimizer, of some of its parameters."""

    inner: Any

    def step(self) -> None:
        self.inner.step()


def nested(model: Any, _optimizer: Any, number: int) -> None:
    """Train by an optimizer of the script's own that steps another one."""
    if number == 0:
        model.outer = Outer(RATE, parameters=model.parameters())
        model.outer.inner = paddle.optimizer.SGD(RATE, parameters=model.parameters()[:2])
    once(model, rows([number], [rank]))
    model.outer.step()
    model.outer.clear_grad()


def twofold(model: Any, optimizer: Any, number: int) -> list[Any]:
    """Return the gradients of one loss, which are cleared before those of another one come."""
    once(model, rows([number], [rank]))
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.clear_grad()
    once(model, rows([number], [rank]) + 1)
    return kept


def subtracted(model: Any, optimizer: Any, number: int) -> None:
    """Combine the gradients of two losses in place."""
    kept = twofold(model, optimizer, number)
    with paddle.no_grad():
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad.subtract_(0.5 * gradient)
    optimizer.step()
    optimizer.clear_grad()


def composed(model: Any, optimizer: Any, number: int) -> None:
    """Combine the gradients of two losses in new ones."""
    kept = twofold(model, optimizer, number)
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = (parameter.grad + gradient).tanh()
    optimizer.step()


def assigned(model: Any, optimizer: Any, _number: int) -> None:
    """Make gradients without backward."""
    net = model._layers
    made: Any = paddle.grad([net(paddle.ones([1, 6])).sum()], net.parameters())
    for parameter, gradient in zip(net.parameters(), made, strict=True):
        parameter.grad = gradient
    optimizer.step()


def clipped_together(model: Any, _optimizer: Any, number: int) -> None:
    """Clip what two optimizers train, one of which steps half as often."""
    parameters = model.parameters()
    if number == 0:
        parts = parameters[:2], parameters[2:]
        model.both = [paddle.optimizer.SGD(RATE, parameters=part) for part in parts]
    once(model, rows([number], [rank]))
    nn.utils.clip_grad_norm_(parameters, 0.05)
    for optimizer in model.both[number % 2 - 1 :]:
        optimizer.step()
    model.clear_gradients()


def alternated(model: Any, optimizer: Any, number: int) -> None:
    """Train two models in turn by one optimizer."""
    net = model._layers
    if number == 0:
        model.parts = [paddle.DataParallel(net[0]), paddle.DataParallel(net[2])]
    once(model.parts[number % 2], paddle.ones([4, 6 + number % 2 * 2]) * (rank + 1))
    optimizer.step()
    optimizer.clear_grad()


report: dict[str, Any] = {}
for name, (backward, change, clear, bad) in KINDS.items():
    net, alone = twins(new)
    train(net, backward, change, clear, bad)
    by_hand = ByHand(RATE, with_one_twice(alone))
    for batch in large(bad):
        backward(alone, batch)
        change(alone.parameters())
        by_hand.step()
        by_hand.clear_grad()
    report[name] = {"weights": weights(net), "alone": weights(alone)}
for way in (adversaries, apart, together, swapped):
    pairs = twins(lambda: nn.LayerList([new(), new()]))
    shared = [paddle.DataParallel(net) for net in pairs[0]]
    sgd = [paddle.optimizer.SGD(RATE, parameters=model.parameters()) for model in shared]
    by_hands = [ByHand(RATE, net.parameters(), MICRO) for net in pairs[1]]
    way(shared, sgd, partial(next, batches([rank], 4, 6)))
    way([*pairs[1]], by_hands, partial(next, batches([0, 1], 4, 6)))
    report[way.__name__] = {"weights": weights(pairs[0]), "alone": weights(pairs[1])}
# Epochs of three micro-steps, some of which end within a round.
net, alone = twins(new)
halved = Halved(RATE, step_size=1, gamma=0.5)
model, by_hand = paddle.DataParallel(net), ByHand(RATE, alone.parameters(), MICRO)
scheduled = paddle.optimizer.SGD(halved, parameters=net.parameters())
for number in range(STEPS):
    once(model, rows([number], [rank]))
    once(alone, rows([number], [0, 1]))
    for method in (scheduled, by_hand):
        method.step()
        method.clear_grad()
    if number % 3 == 2:
        halved.step()
        by_hand.rate /= 2
report["scheduled"] = {"weights": weights(net), "alone": weights(alone)}


def clipped_apart(models: list[Any], optimizers: list[Any], batch: Any) -> None:
    """Clip what each backward has computed before the next one."""
    for model in models:
        once(model, batch)
        clipped(model.parameters())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.clear_grad()


pairs = twins(lambda: nn.LayerList([new(), new()]))
shared = [paddle.DataParallel(net) for net in pairs[0]]
sgd = [paddle.optimizer.SGD(RATE, parameters=model.parameters()) for model in shared]
by_hands = [ByHand(RATE, net.parameters()) for net in pairs[1]]
for number in range(MICRO * UPDATES):
    clipped_apart(shared, sgd, rows([number], [rank]))
for batch in large(()):
    clipped_apart([*pairs[1]], by_hands, batch)
report["clipped_apart"] = {"weights": weights(pairs[0]), "alone": weights(pairs[1])}


def stop(script: Callable[[Any, Any, int], object]) -> str:
    """Return the error that stops SCRIPT."""
    model: Any = paddle.DataParallel(new())
    optimizer = paddle.optimizer.SGD(RATE, parameters=model.parameters())
    try:
        for number in range(MICRO * UPDATES):
            script(model, optimizer, number)
    except RuntimeError as error:
        return str(error)
    return ""


refused = (
    *(
        in_turn,
        nested,
        clipped_between,
        frozen_last,
        thawed_late,
        alternated,
        clipped_together,
        sam,
        decayed,
        noised,
        signs,
        written,
        capped,
        written_late,
    ),
    *(subtracted, composed, assigned),
)
write([report, {script.__name__: stop(script) for script in refused}])
