"""More kinds of loops that one process can also run alone: see `kinds.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from counting import Meter
from learning import KINDS, MICRO, UPDATES, batches, learn, mlp, options, parallel, say
from paddle import nn
from paddle.optimizer import SGD, AdamW, Momentum

if TYPE_CHECKING:
    from collections.abc import Iterator


def share(value: Any) -> Any:
    """Return a micro-step's share of the loss of an update."""
    return value / options.accumulate


def is_due(number: int) -> bool:
    """Whether the script updates after the micro-step NUMBER."""
    return bool((number + 1) % options.accumulate == 0)


def square(out: Any) -> Any:
    return (out**2).mean()


def step(*optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.clear_grad()


def made(kind: Any = Momentum, rate: Any = 0.1, **options: Any) -> tuple[Any, Any, Any]:
    """Return a net, its parallel model, and its optimizer of KIND."""
    net = mlp()
    return net, parallel(net), kind(rate, parameters=net.parameters(), **options)


def micro_steps(
    name: str, nets: list[Any], optimizer: Any, *, updates: int = UPDATES
) -> Iterator[tuple[int, Any]]:
    """Yield batches with their numbers; step after the last one of an update; report NETS."""
    for number, batch in enumerate(batches(6, updates=updates)):
        yield number, batch
        if is_due(number):
            step(optimizer)
    say(name, nets, Meter())


def retained() -> None:
    """Run backward twice through the same graph."""
    net, model, optimizer = made(rate=0.05)
    for _, batch in micro_steps("retained", [net], optimizer):
        value = share(square(model(batch)))
        value.backward(retain_graph=True)
        (value * 0.5).backward()


def losses() -> None:
    """Run backward from two losses of two forwards, and from two of one."""
    net, model, optimizer = made(AdamW, 0.01, epsilon=1e-3, weight_decay=0.1)
    # As for another phase of the training.
    idle = SGD(0.1, parameters=net.parameters())
    for _, batch in micro_steps("losses", [net], optimizer):
        share(square(model(batch))).backward()
        out = model(batch * 0.5)
        both: list[Any] = [share(square(out)), share(out.abs().mean())]
        paddle.autograd.backward(both)
    del idle


def early() -> None:
    """Clear before backward, as most examples of GANs do; the critic gets a gradient penalty."""
    generator, critic = mlp(4), nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    models = parallel(generator), parallel(critic)
    optimizers = [SGD(0.05, parameters=net.parameters()) for net in (generator, critic)]
    for number, batch in enumerate(batches(6)):
        if number % options.accumulate == 0:
            optimizers[1].clear_grad()
        made, real = models[0](batch).detach(), batch[:, 2:4]
        between: Any = 0.5 * made + 0.5 * real
        between.stop_gradient = False
        slope: Any = paddle.grad(models[1](between).sum(), between, create_graph=True)
        value = models[1](made).mean() - models[1](real).mean() + square(slope[0])
        share(value).backward()
        if is_due(number):
            optimizers[1].step()
            optimizers[0].clear_grad()
            optimizers[1].clear_grad()
            (-models[1](models[0](batch)).mean()).backward()
            optimizers[0].step()
    say("early", [generator, critic], Meter())


def skipped() -> None:
    """Drop batches after their backward, the same ones on all ranks."""
    net, model, optimizer = made()
    for number, batch in enumerate(batches(6, updates=4)):
        share(square(model(batch))).backward()
        if number == 2 * MICRO - 1:
            # This drops all micro-batches of this update.
            optimizer.clear_grad()
            continue
        if is_due(number):
            step(optimizer)
    say("skipped", [net], Meter())


def by_hand() -> None:
    """Update without an optimizer."""
    net = mlp()
    model = parallel(net)
    for number, batch in enumerate(batches(6)):
        share(square(model(batch))).backward()
        if is_due(number):
            with paddle.no_grad():
                for parameter in net.parameters():
                    parameter.set_value(parameter - 0.1 * parameter.grad)
                    parameter.clear_gradient()
    say("by_hand", [net], Meter())


def chained() -> None:
    """Feed the output of a parallel model to another one."""
    first, last = mlp(), nn.Linear(2, 3)
    models = parallel(first), parallel(last)
    parts: list[Any] = [*first.parameters(), *last.parameters()]
    optimizer = Momentum(0.1, parameters=parts, grad_clip=nn.ClipGradByGlobalNorm(0.1))
    for _, batch in micro_steps("chained", [first, last], optimizer):
        share(square(models[1](paddle.tanh(models[0](batch))))).backward()


def compiled_in_part() -> None:
    """Compile one layer of several, and recompute another."""
    recompute: Any = paddle.distributed.fleet.utils.recompute
    net = mlp()
    inner = paddle.jit.to_static(net[2])

    def loss(model: Any, batch: Any) -> Any:
        return square(model(batch))

    class Whole(nn.Layer):  # type: ignore[misc, unused-ignore]
        """Run its parts in turn."""

        def __init__(self) -> None:
            super().__init__()
            self.parts = net
            self.inner = inner

        def forward(self, x: Any) -> Any:
            hidden = self.inner(net[1](net[0](x)))
            return recompute(net[4], net[3](hidden), use_reentrant=False, preserve_rng_state=False)

    whole = Whole()
    optimizer = Momentum(0.1, parameters=net.parameters())
    learn("compiled_in_part", whole, optimizer, batches(6), loss)


KINDS.update(
    {
        train.__name__: train
        for train in (*(retained, losses, early, skipped, by_hand, chained, compiled_in_part),)
    }
)
