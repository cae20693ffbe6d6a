"""Models of many shapes, whose gradients may be missing, shared, sparse or frozen."""

from __future__ import annotations

from typing import Any

import learning
import paddle
from learning import MICRO, UPDATES, batches, learn, mlp, options, rank, words
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.optimizer import SGD, Adam, AdamW, Momentum


def cnn() -> None:
    """Train with running statistics, which differ among ranks, and weight decay."""
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
        # The gradient of the keys' bias is nothing but rounding, which Adam would amplify.
        *(0.01, 0.9, 0.99, 1e-3),
        parameters=net.parameters(),
        weight_decay=0.01,
        grad_clip=nn.ClipGradByGlobalNorm(0.05),
    )
    learn("transformer", net, optimizer, batches(5, 8))


class Recomputed(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Drops the activations between its blocks, and recomputes them."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.blocks = nn.LayerList(
            [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
        )

    def forward(self, x: Any) -> Any:
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
    """One table for both the input and the output embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.hidden = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        table: Any = self.words.weight
        return self.hidden(self.words(x)) @ table.T


def tied() -> None:
    paddle.seed(5)
    net = Tied()
    learn("tied", net, Momentum(0.1, parameters=net.parameters()), words(20))


class Adapted(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Multiplies by matrices, or by transposed ones, whose gradients are strided."""

    def __init__(self, *, transposes: bool) -> None:
        super().__init__()
        self.transposes = transposes
        self.down, self.up = self.create_parameter([3, 6]), self.create_parameter([8, 3])
        self.heads, self.last = self.create_parameter([2, 8, 4]), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        if self.transposes:
            hidden = paddle.tanh(x @ self.down.T @ self.up.T)
            heads = hidden @ self.heads.transpose([1, 0, 2]).reshape([8, 8])
        else:
            multiply: Any = paddle.matmul
            hidden = multiply(x, self.down, transpose_y=True)
            hidden = paddle.tanh(multiply(hidden, self.up, transpose_y=True))
            by_head: Any = paddle.einsum("bi,hio->bho", hidden, self.heads)
            heads = by_head.flatten(1)
        return self.last(heads)


def straight(name: str = "straight", *, transposes: bool = False) -> None:
    paddle.seed(5)
    net = Adapted(transposes=transposes)
    learn(name, net, Momentum(0.1, parameters=net.parameters()), batches(6))


def sparse() -> None:
    """Train with sparse gradients."""
    paddle.seed(5)
    net = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 4))
    learn("sparse", net, SGD(0.5, parameters=net.parameters()), words(20))


def frozen() -> None:
    """Train with parts frozen from the beginning, and parts that are not used."""
    net = mlp()
    net.add_sublayer("unused", nn.Identity())
    net.unused.never = nn.Linear(3, 3)
    for parameter in net[2].parameters():
        parameter.stop_gradient = True
    optimizer = Momentum(0.1, parameters=net.parameters())
    learn("frozen", net, optimizer, batches(6), find_unused_parameters=True)


def refrozen(name: str = "refrozen", *, begins_frozen: bool = False) -> None:
    """Freeze a part in the first and third update; if BEGINS_FROZEN, before it is wrapped."""
    net = mlp()

    def freeze(number: int) -> None:
        for parameter in net[2].parameters():
            parameter.stop_gradient = number // MICRO % 2 == 0

    if begins_frozen:
        freeze(0)
    optimizer = Momentum(0.1, parameters=net.parameters())
    learn(name, net, optimizer, batches(6), before=freeze, find_unused_parameters=True)


class Sometimes(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Uses a layer for some rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_times, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Any, more: bool) -> Any:
        x = self.always(x)
        return self.last(x + self.at_times(x) if more else x)


def sometimes() -> None:
    """One rank has a gradient in one micro-step that no rank has in the last."""
    paddle.seed(5)
    net = Sometimes()
    numbers = iter(range(UPDATES * MICRO))

    def loss(model: Any, batch: Any) -> Any:
        number = next(numbers)
        return (model(batch, rank == 1 and number % MICRO == 1) ** 2).mean()

    optimizer = Momentum(0.1, parameters=net.parameters())
    learn("sometimes", net, optimizer, batches(6), loss, find_unused_parameters=True)


def penalty() -> None:
    """Differentiate twice."""

    def loss(model: Any, batch: Any) -> Any:
        batch.stop_gradient = False
        out = model(batch)
        slope: Any = paddle.grad(out.sum(), batch, create_graph=True)
        return (out**2).mean() + (slope[0] ** 2).mean()

    net = mlp()
    learn("penalty", net, Momentum(0.1, parameters=net.parameters()), batches(6), loss)


def accumulated() -> None:
    """Accumulates over two micro-steps, whatever a strategy does; each advances the scheduler."""
    net = mlp()
    rate = paddle.optimizer.lr.StepDecay(0.01, step_size=1, gamma=0.5)
    optimizer = Adam(rate, parameters=net.parameters(), epsilon=1e-4)
    data = batches(6, updates=4)

    def advance(number: int) -> None:
        # Those that update advance it afterwards.
        if number % (2 * options.accumulate) == options.accumulate:
            rate.step()

    learn("accumulated", net, optimizer, data, accumulate=2, no_sync=True, before=advance)


class InTurns(Sometimes):
    """Four gradients; the last one is of the layer for some rows."""

    def __init__(self) -> None:
        nn.Layer.__init__(self)
        self.at_times = nn.Linear(6, 6, bias_attr=False)
        self.always, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias_attr=False)


def in_turns() -> None:
    """One rank has the gradient of a layer in a micro-step, and the other one in the next.

    `clear_grad` sets it to zero in between, which marks it as empty until its rank adds to it. In
    buckets of three it is alone in one.
    """
    paddle.seed(5)
    net = InTurns()
    numbers = iter(range(UPDATES * MICRO))

    def loss(model: Any, batch: Any) -> Any:
        # The rows that one process sees have both halves.
        number = next(numbers)
        halves = [batch] if learning.world > 1 else list(paddle.split(batch, 2))
        parts = [
            (model(half, number % 2 == (learning.rank + place) % 2) ** 2).mean() / len(halves)
            for place, half in enumerate(halves)
        ]
        return sum(parts[1:], parts[0])

    optimizer = Momentum(0.1, parameters=net.parameters())
    learn("in_turns", net, optimizer, batches(6), loss, find_unused_parameters=True)
