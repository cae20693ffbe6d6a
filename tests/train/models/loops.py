"""More kinds of loops that one process can also run alone: see `kinds.py`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import learning
import paddle
from counting import Meter
from learning import KINDS, MICRO, UPDATES, batches, learn, mlp, options, parallel, say
from paddle import nn
from paddle.optimizer import SGD, Adam, AdamW, Momentum

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


def alternating() -> None:
    """Update one half of a model, and then the other."""
    net = mlp()
    model = parallel(net)
    halves = [net[0].parameters(), [*net[2].parameters(), *net[4].parameters()]]
    optimizers: list[Any] = [
        Momentum(0.1, parameters=halves[0]),
        Adam(0.01, parameters=halves[1], epsilon=1e-3),
    ]
    for number, batch in enumerate(batches(6, updates=4)):
        share(square(model(batch))).backward()
        if is_due(number):
            optimizers[number // MICRO % 2].step()
            for optimizer in optimizers:
                optimizer.clear_grad()
    say("alternating", [net], Meter())


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
    for _, batch in micro_steps("losses", [net], optimizer):
        share(square(model(batch))).backward()
        out = model(batch * 0.5)
        both: list[Any] = [share(square(out)), share(out.abs().mean())]
        paddle.autograd.backward(both)


def critic() -> None:
    """Train a critic, whose weights are clipped, twice as often as a generator."""
    generator, critic = mlp(4), nn.Linear(2, 1)
    models = parallel(generator), parallel(critic)
    optimizers = [SGD(0.05, parameters=net.parameters()) for net in (generator, critic)]

    def clip() -> None:
        with paddle.no_grad():
            for parameter in critic.parameters():
                parameter.set_value(parameter.clip(-0.3, 0.3))

    clip()
    for number, batch in enumerate(batches(6, updates=4)):
        real = batch[:, :2]
        value = models[1](models[0](batch).detach()).mean() - models[1](real).mean()
        share(value).backward()
        if is_due(number):
            step(optimizers[1])
            clip()
        if number // MICRO % 2 == 1:
            share(-models[1](models[0](batch)).mean()).backward()
            if is_due(number):
                step(optimizers[0])
                optimizers[1].clear_grad()
    say("critic", [generator, critic], Meter())


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


def smoothed() -> None:
    """Distil from a teacher: a moving average of the weights."""
    net, teacher = mlp(), mlp()
    teacher.set_state_dict(net.state_dict())
    for parameter in teacher.parameters():
        parameter.stop_gradient = True
    optimizer = SGD(0.1, parameters=net.parameters())

    def loss(model: Any, batch: Any) -> Any:
        with paddle.no_grad():
            target = teacher(batch + 0.1)
        return ((model(batch) - target) ** 2).mean() + 0.1 * square(model(batch * 2))

    def follow() -> None:
        with paddle.no_grad():
            for own, other in zip(teacher.parameters(), net.parameters(), strict=True):
                own.set_value(0.9 * own + 0.1 * other)

    learn("smoothed", net, optimizer, batches(6), loss, after=follow)
    learning.report["smoothed"]["weights"] += learning.weights(teacher)


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


def projected() -> None:
    """Combine the gradients of two losses without conflict (PCGrad)."""
    net, model, optimizer = made(SGD, 0.1)
    parts: list[Any] = []
    for number, batch in enumerate(batches(6)):
        parts.append(batch)
        if not is_due(number):
            continue
        kept: list[list[Any]] = []
        for shift in (0.0, 0.5):
            for part in parts:
                share(square(model(part) - shift)).backward()
            kept.append([parameter.grad.clone() for parameter in net.parameters()])
            optimizer.clear_grad(set_to_zero=shift == 0.0)
        with paddle.no_grad():
            for parameter, gradient, other in zip(net.parameters(), *kept, strict=True):
                against: Any = paddle.clip(
                    (gradient * other).sum() / square(other) / other.size, max=0
                )
                parameter.grad = gradient - against * other + other
        step(optimizer)
        parts = []
    say("projected", [net], Meter())


def chained() -> None:
    """Feed the output of a parallel model to another one."""
    first, last = mlp(), nn.Linear(2, 3)
    models = parallel(first), parallel(last)
    parts: list[Any] = [*first.parameters(), *last.parameters()]
    optimizer = Momentum(0.1, parameters=parts, grad_clip=nn.ClipGradByGlobalNorm(0.1))
    for _, batch in micro_steps("chained", [first, last], optimizer):
        share(square(models[1](paddle.tanh(models[0](batch))))).backward()


def tried_again() -> None:
    """Continue after a failed forward, and after a failed backward."""
    net, model, optimizer = made()

    def fail(_gradient: Any) -> None:
        raise RuntimeError("on purpose")

    for number, batch in micro_steps("tried_again", [net], optimizer):
        if number == MICRO:
            with contextlib.suppress(ValueError):
                model(batch[:, :3])
            with contextlib.suppress(Exception):
                # The backward fails before the first gradient.
                out = model(batch)
                out.register_hook(fail)
                square(out).backward()
        share(square(model(batch))).backward()


def reloaded() -> None:
    """Return to a checkpoint that was saved midway."""
    net, model, optimizer = made(Adam, 0.01, epsilon=1e-3)
    saved: Any = None
    for number, batch in micro_steps("reloaded", [net], optimizer, updates=4):
        if number == MICRO:
            saved = [
                {name: tensor.clone() for name, tensor in model.state_dict().items()},
                {
                    name: value.clone() if isinstance(value, paddle.Tensor) else value
                    for name, value in optimizer.state_dict().items()
                },
            ]
        if number == 2 * MICRO:
            model.set_state_dict(saved[0])
            optimizer.set_state_dict(saved[1])
        share(square(model(batch))).backward()


def sizes_of_its_own() -> None:
    """Give DataParallel sizes of buckets, and accumulate in its `no_sync`."""
    net = mlp()
    optimizer = Momentum(0.1, parameters=net.parameters())
    data: Iterator[Any] = batches(6)
    sizes: Any = {"comm_buffer_size": 1, "last_comm_buffer_size": 1}
    learn("sizes_of_its_own", net, optimizer, data, no_sync=True, **sizes)


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


def unscaled() -> None:
    """Scale each loss by hand under autocast, and unscale the gradients in place."""
    net, model, optimizer = made()
    for number, batch in micro_steps("unscaled", [net], optimizer):
        with paddle.amp.auto_cast(level="O1", enable=False):
            value = square(model(batch))
        (share(value) * 512.0).backward()
        if is_due(number):
            with paddle.no_grad():
                for parameter in net.parameters():
                    parameter.grad.scale_(1 / 512.0)


def replaced_at_the_end() -> None:
    """Replace each gradient at the end of backward, as fp32 master gradients are."""
    core: Any = paddle.base.core
    add = getattr(core.eager, "_add_backward_final_hook", None)
    net, model, optimizer = made()

    def replace() -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    for _, batch in micro_steps("replaced_at_the_end", [net], optimizer):
        value = share(square(model(batch)))
        if add is not None:
            add(replace)
        value.backward()


def joined() -> None:
    """Add a layer to the optimizer later, as its own group."""
    net = mlp()
    model = parallel(net)
    groups: list[Any] = [{"params": net[4].parameters()}]
    optimizer: Any = SGD(0.1, parameters=groups)
    for number, batch in enumerate(batches(6)):
        if number == MICRO:
            optimizer._add_param_group({"params": net[0].parameters()})
        share(square(model(batch))).backward()
        if is_due(number):
            optimizer.step()
            optimizer.clear_grad()
            net.clear_gradients()
    say("joined", [net], Meter())


KINDS.update(
    {
        train.__name__: train
        for train in (
            *(alternating, retained, losses, critic, early, skipped, smoothed, by_hand, projected),
            *(chained, tried_again, reloaded, sizes_of_its_own, compiled_in_part, unscaled),
            *(replaced_at_the_end, joined),
        )
    }
)
