"""Many ways to step an optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from counting import Meter
from learning import MICRO, batches, learn, mlp, options, rank, report, say, weights
from paddle import nn
from paddle.optimizer import Adam, AdamW, Momentum


def groups() -> None:
    net = mlp()
    parts: list[Any] = [
        {"params": net[0].parameters(), "learning_rate": 0.1},
        {"params": [*net[2].parameters(), *net[4].parameters()], "weight_decay": 0.1},
    ]
    optimizer = AdamW(0.01, parameters=parts, grad_clip=nn.ClipGradByGlobalNorm(0.05))
    learn("groups", net, optimizer, batches(6))


def averaging(net: Any) -> Any:
    return paddle.incubate.ModelAverage(
        1.0, parameters=net.parameters(), min_average_window=2, max_average_window=10
    )


def wrapped() -> None:
    """Train with optimizers that wrap others."""
    net = mlp()
    inner = Momentum(0.1, parameters=net.parameters())
    lookahead = paddle.incubate.LookAhead(inner, alpha=0.5, k=2)
    learn("lookahead", net, lookahead, batches(6))
    net = mlp()
    inner = Momentum(0.1, parameters=net.parameters())
    average = averaging(net)
    learn("average", net, inner, batches(6), after=average.step)
    with average.apply():
        report["average"]["averaged"] = weights(net)


def scaler_on_cpu() -> Any:
    """Return a GradScaler on the CPU, whose kernels exist, although Paddle asks for a GPU."""
    module: Any = paddle.amp.grad_scaler
    place = type("Place", (), {"is_gpu_place": lambda _: True})()
    tracer = module._dygraph_tracer
    module._dygraph_tracer = lambda: type("Tracer", (), {"_expected_place": place})
    made: Any = paddle.amp.GradScaler(
        init_loss_scaling=1024.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1
    )
    module._dygraph_tracer = tracer
    module.amp_global_state().amp_dtype = "float16"
    # Paddle prints the scale in a way that newer numpy rejects.
    made._scale = made._scale.reshape([])
    return made


def scaled() -> None:
    """Scale the loss, which is infinite once."""
    net = mlp()
    model = paddle.DataParallel(net)
    optimizer = Momentum(0.1, parameters=net.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.1))
    scaler = scaler_on_cpu()
    meter = Meter()
    for number, batch in enumerate(batches(6, updates=5)):
        value = (model(batch) ** 2).mean()
        if number == MICRO + 1 and rank == 1:
            value = value * float("inf")
        with meter.running():
            scaler.scale(value / options.accumulate).backward()
        if (number + 1) % options.accumulate == 0:
            if number > 3 * MICRO:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
    say("scaled", [net], meter, scale=float(scaler.state_dict()["scale"]))


def paired() -> None:
    """Step two optimizers through one scaler, the second of them half as often."""
    nets = mlp(), mlp(4)
    models = [paddle.DataParallel(net) for net in nets]
    optimizers = [Momentum(0.1, parameters=net.parameters()) for net in nets]
    scaler = scaler_on_cpu()
    meter = Meter()
    for number, batch in enumerate(batches(6, updates=6)):
        due = []
        for model, optimizer, every in zip(models, optimizers, (1, 2), strict=True):
            if (number + 1) % every == 0:
                value = (model(batch) ** 2).mean() / options.accumulate
                with meter.running():
                    scaler.scale(value).backward()
                if (number + 1) % (every * options.accumulate) == 0:
                    due.append(optimizer)
        for optimizer in due:
            scaler.step(optimizer)
        if due:
            scaler.update()
        for optimizer in due:
            optimizer.clear_grad()
    say("paired", [*nets], meter, scale=float(scaler.state_dict()["scale"]))


class Pairs(paddle.io.Dataset):  # type: ignore[misc, type-arg, unused-ignore]
    """Rows for both ranks, with labels."""

    def __getitem__(self, index: int) -> Any:
        numbers = np.random.RandomState(index).randn(6).astype("float32")
        return numbers, np.array([index % 2], "int64")

    def __len__(self) -> int:
        return 32


def fitted() -> None:
    """Train by Paddle's own loop; it sums gradients, so the rate is smaller."""
    net = mlp()
    model = paddle.Model(net)
    optimizer = Momentum(0.1 / options.accumulate, parameters=net.parameters())
    model.prepare(optimizer, nn.CrossEntropyLoss())
    model.fit(
        *(Pairs(), None, 2),
        shuffle=False,
        verbose=0,
        accumulate_grad_batches=options.accumulate,
    )
    say("fitted", [net], Meter())


def by_fleet() -> None:
    """Let fleet wrap model and optimizer."""
    fleet: Any = paddle.distributed.fleet
    fleet.init(is_collective=True)
    net = mlp()
    optimizer = fleet.distributed_optimizer(Momentum(0.1, parameters=net.parameters()))
    model = fleet.distributed_model(net)
    meter = Meter()
    for number, batch in enumerate(batches(6)):
        with meter.running():
            ((model(batch) ** 2).mean() / options.accumulate).backward()
        if (number + 1) % options.accumulate == 0:
            optimizer.step()
            optimizer.clear_grad()
    say("by_fleet", [net], meter)


def normed() -> None:
    """Drop the second update, whose norm is not finite."""
    net = mlp()
    model = paddle.DataParallel(net)
    optimizer = Momentum(0.1, parameters=net.parameters())
    meter = Meter()
    for number, batch in enumerate(batches(6)):
        with meter.running():
            value = (model(batch) ** 2).mean()
            if number == MICRO and rank == 1:
                value = value * float("nan")
            (value / options.accumulate).backward()
        if (number + 1) % options.accumulate == 0:
            if np.isfinite(float(nn.utils.clip_grad_norm_(net.parameters(), 0.1))):
                optimizer.step()
            optimizer.clear_grad()
    say("normed", [net], meter)


def resumed() -> None:
    """Save after the second update; another run resumes from there."""
    # Names start afresh, because checkpoints match parameters by name.
    with paddle.utils.unique_name.guard("resumed_"):
        net = mlp()
        rate = paddle.optimizer.lr.StepDecay(0.01, step_size=1, gamma=0.5)
        optimizer = Adam(rate, parameters=net.parameters(), epsilon=1e-4)
    path = options.checkpoint / "resumed"

    def save(number: int) -> None:
        if number == 2 * MICRO and not rank:
            states: list[Any] = [net.state_dict(), optimizer.state_dict(), rate.state_dict()]
            paddle.save(states, str(path))

    if not options.resume:
        learn("resumed", net, optimizer, batches(6), before=save)
        return
    states: Any = paddle.load(str(path))
    net.set_state_dict(states[0])
    optimizer.set_state_dict(states[1])
    rate.set_state_dict(states[2])
    learn("resumed", net, optimizer, batches(6), begin=2 * MICRO)
    # Two more micro-steps, too few for an update.
    model = paddle.DataParallel(net)
    for _, batch in zip(range(2), batches(6), strict=False):
        (model(batch) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    report["resumed"]["after"] = weights(net)
