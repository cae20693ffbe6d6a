"""Trains models of many kinds with micro-batches, one after the other, and reports on each.

It knows nothing of a strategy: `--accumulate 4` is its own way to a larger batch, which it is also
given with a strategy that makes it of `--accumulate 1`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from counting import Meter  # type: ignore[import-not-found, unused-ignore]
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.optimizer import SGD, Adam, AdamW, Momentum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UPDATES, MICRO, ROWS = 3, 4, 8

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, required=True)
parser.add_argument("--divide", type=int)
parser.add_argument("--kinds", default="")
parser.add_argument("--checkpoint", type=Path, default=Path())
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

rank, world = (int(os.environ[f"PADDLE_TRAINER{name}"]) for name in ("_ID", "S_NUM"))
paddle.distributed.init_parallel_env()
report: dict[str, Any] = {}


def batches(*shape: int, updates: int = UPDATES) -> Iterator[Any]:
    """Return this rank's rows of batches that are the same for any number of ranks."""
    numbers = np.random.RandomState(3)
    for _ in range(updates * MICRO):
        rows = numbers.randn(ROWS, *shape).astype("float32")
        yield paddle.to_tensor(np.split(rows, world)[rank])


def words(count: int) -> Iterator[Any]:
    numbers = np.random.RandomState(4)
    for _ in range(UPDATES * MICRO):
        rows = numbers.randint(0, count, (ROWS, 5))
        yield paddle.to_tensor(np.split(rows, world)[rank])


def mlp(width: int = 8) -> Any:  # noqa: ANN401 - a layer
    paddle.seed(5)
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )


def weights(net: Any, *, running: bool = False) -> list[float]:  # noqa: ANN401 - a layer
    """Return the numbers in the parameters of NET, or its RUNNING statistics."""
    return [
        float(value)
        for name, each in net.named_parameters()
        for value in each.numpy().ravel()
        if name.endswith(("_mean", "_variance")) is running
    ]


def say(name: str, nets: list[Any], meter: Meter, **more: Any) -> None:  # noqa: ANN401
    """Report what became of NETS, and what METER has counted."""
    trained = [each for net in nets for each in net.parameters() if not each.stop_gradient]
    report[name] = {
        # In the order in which backward makes them, or nearly so.
        "sizes": [each.size * 4 for each in trained][::-1],
        "weights": [value for net in nets for value in weights(net)],
        "running": [value for net in nets for value in weights(net, running=True)],
        **meter.report(),
        **more,
    }


def learn(
    name: str,
    net: Any,  # noqa: ANN401 - a layer
    optimizer: Any,  # noqa: ANN401
    data: Iterator[Any],
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    accumulate: int = 1,
    no_sync: bool = False,
    before: Callable[[int], None] | None = None,
    after: Callable[[], None] | None = None,
    begin: int = 0,
    **arguments: Any,  # noqa: ANN401 - of DataParallel
) -> None:
    """Train NET as any script would; BEFORE each micro-step, and AFTER each step of OPTIMIZER."""
    model = paddle.DataParallel(net, **arguments)
    steps = accumulate * options.accumulate
    meter = Meter()
    rate = optimizer._learning_rate  # noqa: SLF001 - public in one Paddle only
    for number, batch in enumerate(data):
        if number < begin:
            continue
        if before is not None:
            before(number)
        is_due = (number + 1) % steps == 0
        with meter.running(), contextlib.ExitStack() as stack:
            if no_sync and not is_due:
                stack.enter_context(model.no_sync())
            value = (model(batch) ** 2).mean() if loss is None else loss(model, batch)
            (value / (options.divide or steps)).backward()
        if is_due:
            optimizer.step()
            optimizer.clear_grad()
            if not isinstance(rate, float):
                rate.step()
            if after is not None:
                after()
    say(name, [net], meter)


def cnn() -> None:
    """With running statistics, which are each rank's own, and weight decay."""
    paddle.seed(5)
    net = nn.Sequential(
        *(nn.Conv2D(1, 4, 3), nn.BatchNorm2D(4), nn.ReLU(), nn.Conv2D(4, 4, 3)),
        *(nn.BatchNorm2D(4), nn.ReLU(), nn.AdaptiveAvgPool2D(2), nn.Flatten(), nn.Linear(16, 3)),
    )
    rate = paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5)
    optimizer = Momentum(rate, parameters=net.parameters(), weight_decay=0.01)
    learn("cnn", net, optimizer, batches(1, 8, 8))


def transformer() -> None:
    paddle.seed(5)
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    optimizer = AdamW(
        # The bias of the keys has no gradient but for rounding, which Adam would enlarge.
        *(0.01, 0.9, 0.99, 1e-3),
        parameters=net.parameters(),
        weight_decay=0.01,
        grad_clip=nn.ClipGradByGlobalNorm(0.05),
    )
    learn("transformer", net, optimizer, batches(5, 8))


class Recomputed(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Forgets what is between its blocks, and makes it again."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.blocks = nn.LayerList(
            [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
        )

    def forward(self, x: Any) -> Any:  # noqa: ANN401, D102
        x = self.first(x)
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return self.last(x)


def recomputed(name: str = "recomputed", *, reentrant: bool = False) -> None:
    paddle.seed(5)
    net = Recomputed(reentrant=reentrant)
    optimizer = Adam(0.01, parameters=net.parameters(), epsilon=1e-4)
    learn(name, net, optimizer, batches(6))


class Tied(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Words in and words out, of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.hidden = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:  # noqa: ANN401, D102
        table: Any = self.words.weight
        return self.hidden(self.words(x)) @ table.T


def tied() -> None:
    paddle.seed(5)
    net = Tied()
    learn("tied", net, Momentum(0.1, parameters=net.parameters()), words(20))


def sparse() -> None:
    """With gradients of the rows that occur only."""
    paddle.seed(5)
    net = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 4))
    learn("sparse", net, SGD(0.5, parameters=net.parameters()), words(20))


def frozen() -> None:
    """Frozen from the beginning, in part; and parts that are not used."""
    net = mlp()
    net.add_sublayer("unused", nn.Identity())
    net.unused.never = nn.Linear(3, 3)
    for each in net[2].parameters():
        each.stop_gradient = True
    optimizer = Momentum(0.1, parameters=net.parameters())
    learn("frozen", net, optimizer, batches(6), find_unused_parameters=True)


def refrozen(name: str = "refrozen", *, begins_frozen: bool = False) -> None:
    """Frozen in the first update and in the third, as DataParallel knows from the beginning."""
    net = mlp()

    def freeze(number: int) -> None:
        for each in net[2].parameters():
            each.stop_gradient = number // MICRO % 2 == 0

    if begins_frozen:
        freeze(0)
    optimizer = Momentum(0.1, parameters=net.parameters())
    learn(name, net, optimizer, batches(6), before=freeze, find_unused_parameters=True)


def accumulated() -> None:
    """Accumulates over two micro-steps, whatever a strategy does."""
    net = mlp()
    optimizer = Adam(0.01, parameters=net.parameters(), epsilon=1e-4)
    data = batches(6, updates=4)
    learn("accumulated", net, optimizer, data, accumulate=2, no_sync=True)


def groups() -> None:
    net = mlp()
    parts: list[Any] = [
        {"params": net[0].parameters(), "learning_rate": 0.1},
        {"params": [*net[2].parameters(), *net[4].parameters()], "weight_decay": 0.1},
    ]
    optimizer = AdamW(0.01, parameters=parts, grad_clip=nn.ClipGradByGlobalNorm(0.05))
    learn("groups", net, optimizer, batches(6))


def several() -> None:
    for kind in ("Lamb", "RMSProp", "Adagrad", "Adamax", "Adadelta"):
        net = mlp()
        optimizer = getattr(paddle.optimizer, kind)(0.01, parameters=net.parameters())
        learn(kind, net, optimizer, batches(6))


class Mine(Momentum):  # type: ignore[misc, unused-ignore]
    """An optimizer of the script's own, which counts its updates."""

    updates = 0

    def step(self) -> None:
        """Step as its base does."""
        super().step()
        self.updates += 1


def own() -> None:
    net = mlp()
    optimizer = Mine(0.1, parameters=net.parameters())
    learn("own", net, optimizer, batches(6))
    report["own"]["updates"] = optimizer.updates


def averaging(net: Any) -> Any:  # noqa: ANN401
    return paddle.incubate.ModelAverage(
        1.0, parameters=net.parameters(), min_average_window=2, max_average_window=10
    )


def wrapped() -> None:
    """With optimizers around others."""
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


def two() -> None:
    """Train two models with an optimizer each, as one depends on the other."""
    first, second = mlp(), mlp(4)
    both = [paddle.DataParallel(each) for each in (first, second)]
    optimizers: list[Any] = [
        SGD(0.1, parameters=first.parameters()),
        Adam(0.01, parameters=second.parameters(), epsilon=1e-4),
    ]
    meter = Meter()
    for number, batch in enumerate(batches(6)):
        is_due = (number + 1) % options.accumulate == 0
        target = both[0](batch)
        for value, optimizer in (
            ((target**2).mean(), optimizers[0]),
            (((both[1](batch) - target.detach()) ** 2).mean(), optimizers[1]),
        ):
            with meter.running():
                (value / options.accumulate).backward()
            if is_due:
                optimizer.step()
                optimizer.clear_grad()
    say("two", [first, second], meter)


def scaler_on_cpu() -> Any:  # noqa: ANN401
    """Return a GradScaler where Paddle wants a GPU for it; its kernels are there for the CPU."""
    module: Any = paddle.amp.grad_scaler
    place = type("Place", (), {"is_gpu_place": lambda _: True})()
    tracer = module._dygraph_tracer  # noqa: SLF001
    module._dygraph_tracer = lambda: type("Tracer", (), {"_expected_place": place})  # noqa: SLF001
    made: Any = paddle.amp.GradScaler(
        init_loss_scaling=1024.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1
    )
    module._dygraph_tracer = tracer  # noqa: SLF001
    module.amp_global_state().amp_dtype = "float16"
    # Paddle prints it, in a way that this numpy does not know any more.
    made._scale = made._scale.reshape([])  # noqa: SLF001
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
        if number == MICRO + 1:
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


class Rows(paddle.io.Dataset):  # type: ignore[misc, type-arg, unused-ignore]
    """Rows of numbers, of which each rank has its own half."""

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return np.random.RandomState(index * world + rank).randn(6).astype("float32")

    def __len__(self) -> int:
        return 12


def loaded() -> None:
    """Read two epochs of six micro-batches, so that the last ones of each are too few."""
    net = mlp()
    model = paddle.DataParallel(net)
    inner = Momentum(0.1, parameters=net.parameters())
    optimizer = paddle.incubate.LookAhead(inner, alpha=0.5, k=2)
    average = averaging(net)
    loader = paddle.io.DataLoader(Rows(), batch_size=2)
    meter = Meter()
    for _ in range(2):
        for number, batch in enumerate(loader):
            left = len(loader) - number // options.accumulate * options.accumulate
            with meter.running():
                ((model(batch) ** 2).mean() / min(options.accumulate, left)).backward()
            if (number + 1) % options.accumulate == 0 or number + 1 == len(loader):
                optimizer.step()
                optimizer.clear_grad()
                average.step()
    say("loaded", [net], meter)
    with average.apply():
        report["loaded"]["averaged"] = weights(net)


def clipped() -> None:
    """Clip gradients by a function of the script, unscaled before, and have a rest of them."""
    net = mlp()
    model = paddle.DataParallel(net)
    optimizer = Momentum(0.1, parameters=net.parameters())
    scaler = scaler_on_cpu()
    loader = paddle.io.DataLoader(Rows(), batch_size=2)
    meter = Meter()
    for number, batch in enumerate(loader):
        left = len(loader) - number // options.accumulate * options.accumulate
        with meter.running():
            value = (model(batch) ** 2).mean() / min(options.accumulate, left)
            scaler.scale(value).backward()
        if (number + 1) % options.accumulate == 0 or number + 1 == len(loader):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
    say("clipped", [net], meter, scale=float(scaler.state_dict()["scale"]))


def penalty() -> None:
    """Differentiate twice."""

    def loss(model: Any, batch: Any) -> Any:  # noqa: ANN401
        batch.stop_gradient = False
        out = model(batch)
        slope: Any = paddle.grad(out.sum(), batch, create_graph=True)
        return (out**2).mean() + (slope[0] ** 2).mean()

    net = mlp()
    learn("penalty", net, Momentum(0.1, parameters=net.parameters()), batches(6), loss)


def compiled() -> None:
    net = mlp()
    optimizer = Momentum(0.1, parameters=net.parameters())
    learn("compiled", paddle.jit.to_static(net), optimizer, batches(6))


class Pairs(Rows):
    """Rows for both ranks, with labels."""

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        numbers = np.random.RandomState(index).randn(6).astype("float32")
        return numbers, np.array([index % 2], "int64")

    def __len__(self) -> int:
        return 32


def fitted() -> None:
    """Let Paddle's own loop train; it sums gradients, so the rate is smaller."""
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


def adversaries() -> None:
    """One model's backward reaches into the other, whose gradients are then thrown away."""
    maker, judge = nn.Linear(6, 6), mlp()
    models = [paddle.DataParallel(each) for each in (maker, judge)]
    optimizers = [SGD(0.1, parameters=each.parameters()) for each in (maker, judge)]
    try:
        for batch in batches(6):
            for which, optimizer in enumerate(optimizers):
                made = models[0](batch)
                value = (models[1](made if which == 0 else made.detach()) ** 2).mean()
                (value / options.accumulate).backward()
                optimizer.step()
                for each in optimizers:
                    each.clear_grad()
    except RuntimeError as error:
        report["adversaries"] = str(error)


def resumed() -> None:
    """Save after the second update; another run goes on from there."""
    # As if nothing else was trained before: a checkpoint goes by names.
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
    # Two more, which are too few for an update.
    model = paddle.DataParallel(net)
    for _, batch in zip(range(2), batches(6), strict=False):
        (model(batch) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    report["resumed"]["after"] = weights(net)


KINDS = {
    each.__name__: each
    for each in (
        *(cnn, transformer, recomputed, tied, sparse, frozen, refrozen, accumulated, groups),
        *(
            several,
            own,
            wrapped,
            two,
            scaled,
            loaded,
            clipped,
            resumed,
            penalty,
            compiled,
            fitted,
            by_fleet,
        ),
    )
}
# What Paddle's own reducer cannot train, or trains apart.
MORE = {
    "adversaries": adversaries,
    "reentrant": lambda: recomputed("reentrant", reentrant=True),
    "thawed": lambda: refrozen("thawed", begins_frozen=True),
}
ASKED = {**KINDS, **MORE}
chosen = KINDS if not options.kinds else {name: ASKED[name] for name in options.kinds.split(",")}
for train in chosen.values():
    train()
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
