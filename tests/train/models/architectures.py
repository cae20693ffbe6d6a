"""More kinds of models that one process can also train alone: see `kinds.py`."""

from __future__ import annotations

from typing import Any

import learning
import paddle
from learning import KINDS, UPDATES, batches, learn, trained
from paddle import nn
from paddle.nn import functional
from paddle.optimizer import SGD, Momentum


@trained(6, find_unused_parameters=True)
class Experts(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Each row chooses one of four experts; a rank may leave an expert unused."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.LayerList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        shares = functional.softmax(self.gate(x))
        best = shares.argmax(-1)
        out = paddle.zeros_like(x)
        for place, expert in enumerate(self.experts):
            rows = (best == place).nonzero().flatten()
            if rows.shape[0]:
                some = (
                    expert(x.index_select(rows)) * shares.index_select(rows)[:, place : place + 1]
                )
                out = paddle.scatter(out, rows, some, overwrite=False)
        return out


def _twofold_loss(model: Any, batch: Any) -> Any:
    # A name that fleetrun uses, too.
    out = model(x=batch, model=2.0)
    return out["likeness"].mean() + (out["head"][0] ** 2).mean()


@trained(6, loss=_twofold_loss, find_unused_parameters=True)
class Twofold(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Applies the same layers twice, and returns a dictionary that is used in part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.idle = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, *, x: Any, model: float) -> dict[str, Any]:
        hidden, flipped = self.body(x) * model, self.body(paddle.flip(x, [1]))
        return {
            "likeness": (hidden * flipped).sum(-1),
            "head": [self.head(hidden)],
            "idle": self.idle(hidden),
        }


class Mixed(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Parameters of two dtypes, alternating."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.middle = nn.ParameterList(
            [self.create_parameter([6, 6], dtype="float64") for _ in range(2)]
        )

    def forward(self, x: Any) -> Any:
        x = self.first(x).astype("float64")
        for weight in self.middle:
            x = paddle.tanh(x @ weight)
        return self.last(x.astype("float32"))


class Both:
    """An optimizer for each dtype, as Paddle's optimizers take one only."""

    _learning_rate = 0.1

    def __init__(self, *optimizers: Any) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def clear_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.clear_grad()


def mixed() -> None:
    paddle.seed(5)
    net = Mixed()
    wide = list(net.middle)
    narrow = [*net.first.parameters(), *net.last.parameters()]
    both = Both(*(Momentum(0.1, parameters=parameters) for parameters in (wide, narrow)))
    learn("mixed", net, both, batches(6))


@trained(6)
class Hooked(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Hooks of the script on parameters, activations and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        weight: Any = self.first.weight
        weight.register_hook(lambda gradient: gradient * 0.5)
        register: Any = self.first.register_forward_post_hook
        register(lambda _layer, _inputs, out: out * 2.0)

    def forward(self, x: Any) -> Any:
        hidden = paddle.tanh(self.first(x))
        hidden.register_hook(lambda gradient: gradient * paddle.to_tensor([0.2, 0, 1, 1, 2, 1]))
        return self.last(hidden)


def each_rank() -> None:
    """Train an expert per rank, which other ranks do not average."""
    paddle.seed(5)
    shared = nn.Linear(6, 6)
    own = [nn.Linear(6, 3) for _ in range(2)]
    for expert in own:
        for parameter in expert.parameters():
            parameter.no_sync = True

    class Part(nn.Layer):  # type: ignore[misc, unused-ignore]
        """The shared layer, and the experts of these ranks."""

        def __init__(self) -> None:
            super().__init__()
            self.shared = shared
            self.own = nn.LayerList(
                own if learning.world == 1 else [own[learning.rank]],
            )

        def forward(self, x: Any) -> Any:
            parts = paddle.split(paddle.tanh(self.shared(x)), len(self.own))
            return paddle.concat(
                [expert(rows) for expert, rows in zip(self.own, parts, strict=True)]
            )

    net = Part()
    # The mean over a rank's rows alone makes gradients `world` times as large.
    rate = 0.1 if learning.world == 1 else 0.1 / learning.world
    parts: list[Any] = [
        {"params": shared.parameters()},
        {"params": net.own.parameters(), "learning_rate": rate / 0.1},
    ]
    learn("each_rank", net, SGD(0.1, parameters=parts), batches(6, updates=UPDATES))
    shared_weights = learning.weights(shared)
    learning.report["each_rank"]["weights"] = shared_weights
    experts = learning.weights(net.own)
    half = len(experts) // 2
    learning.report["each_rank"]["own"] = (
        [experts[:half], experts[half:]] if learning.world == 1 else experts
    )


KINDS.update({train.__name__: train for train in (mixed, each_rank)})
