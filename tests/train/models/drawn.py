"""Random networks, optimizers and loops: `drawn(SEED)` always draws the same."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from counting import Meter
from learning import batches, options, parallel, say
from paddle import nn
from paddle.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 6


class Straight(nn.Layer):  # type: ignore[misc, unused-ignore]
    """A layer, a function of its output, and possibly a skip connection."""

    def __init__(self, layer: Any, *, adds: bool = False) -> None:
        super().__init__()
        self.layer, self.adds = layer, adds

    def forward(self, x: Any) -> Any:
        out = paddle.tanh(self.layer(x))
        return x + out if self.adds else out


class Weighted(nn.Layer):  # type: ignore[misc, unused-ignore]
    """A weight that is used in one WAY."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight, self.bias = self.create_parameter([WIDTH, WIDTH]), self.create_parameter([1])

    def forward(self, x: Any) -> Any:
        if self.way == "transposed":
            return x @ self.weight.T + self.bias
        if self.way == "contracted":
            product: Any = paddle.einsum("bi,oi->bo", x, self.weight)
            return product + self.bias
        if self.way == "cut":
            half: Any = self.weight[: WIDTH // 2]
            return x + x[:, : WIDTH // 2] @ half
        return x @ paddle.tril(self.weight) * paddle.exp(self.bias)


class Looked(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Looks up rows of a table, by the largest number of each input row."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=sparse)

    def forward(self, x: Any) -> Any:
        return x + self.table(x.argmax(-1))


class Chosen(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Uses a layer for some rows, and sometimes for none."""

    def __init__(self, above: float) -> None:
        super().__init__()
        self.layer, self.above = nn.Linear(WIDTH, WIDTH), above

    def forward(self, x: Any) -> Any:
        rows = (x.detach().mean(-1) > self.above).nonzero().flatten()
        if not rows.shape[0]:
            return x
        return x + paddle.scatter(
            paddle.zeros_like(x), rows, self.layer(x.index_select(rows)), overwrite=False
        )


class Again(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Drops the activations within, and recomputes them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))

    def forward(self, x: Any) -> Any:
        recompute: Any = paddle.distributed.fleet.utils.recompute
        return recompute(self.inner, x, use_reentrant=False, preserve_rng_state=False)


class Sequence(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Treats the numbers of a row as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(1, 3)
        self.convolution, self.last = nn.Conv1D(3, 2, 3, padding=1), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        hidden: Any = self.cell(x.unsqueeze(-1))[0]
        return x + self.last(self.convolution(hidden.transpose([0, 2, 1])).flatten(1))


def frozen() -> Any:
    layer = nn.Linear(WIDTH, WIDTH)
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    return Straight(layer)


# The norms never divide by a small number, which would amplify rounding.
BLOCKS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda _: Straight(nn.Linear(WIDTH, WIDTH)),
    "residual": lambda _: Straight(nn.Linear(WIDTH, WIDTH), adds=True),
    "norm": lambda _: nn.LayerNorm(WIDTH, epsilon=1e-3),
    "groups": lambda _: nn.GroupNorm(2, WIDTH, epsilon=0.1),
    "weighted": lambda random: Weighted(
        random.choice(["transposed", "contracted", "cut", "triangle"])
    ),
    "table": lambda random: Looked(sparse=bool(random.randint(2))),
    "chosen": lambda random: Chosen(random.choice([-0.3, 0.0, 0.5])),
    "again": lambda _: Again(),
    "sequence": lambda _: Sequence(),
    "frozen": lambda _: frozen(),
    "spectral": lambda _: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "scaled": lambda _: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Successive blocks, some of which are used twice."""

    def __init__(self, random: Any) -> None:
        super().__init__()
        names = random.choice(list(BLOCKS), random.randint(1, 6))
        self.blocks = nn.LayerList([BLOCKS[name](random) for name in names])
        order = list(range(len(names)))
        self.repeated = random.randint(5) == 0 and "again" not in names
        if self.repeated:
            order.append(random.randint(len(names)))
        self.order = order
        # In Paddle 2.6 a norm of an input without a gradient raises.
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for place in self.order:
            x = self.blocks[place](x)
        return self.last(x)


def optimizer(random: Any, net: Any) -> Any:
    """Draw an optimizer for NET; not all of them take sparse gradients."""
    has_sparse = any(getattr(layer, "_sparse", False) for layer in net.sublayers())
    clips = [
        *(None, None, nn.ClipGradByGlobalNorm(0.1)),
        *(nn.ClipGradByNorm(0.05), nn.ClipGradByValue(0.01)),
    ]
    clip = None if has_sparse else clips[random.randint(len(clips))]
    rate: Any = 0.05
    if random.randint(3) == 0:
        rate = paddle.optimizer.lr.StepDecay(0.05, step_size=1, gamma=0.5)
    trained = [parameter for parameter in net.parameters() if not parameter.stop_gradient]
    parts: Any = trained
    if len(trained) > 3 and random.randint(4) == 0 and not has_sparse:
        parts = [{"params": trained[:2], "learning_rate": 0.5}, {"params": trained[2:]}]
    kinds: dict[str, dict[str, Any]] = {
        "SGD": {},
        "Momentum": {"use_nesterov": bool(random.randint(2))},
        "Adam": {"epsilon": 1e-2},
        "AdamW": {"epsilon": 1e-2, "weight_decay": 0.1},
        "Lamb": {"epsilon": 1e-2, "lamb_weight_decay": 0.01},
        "Adagrad": {"epsilon": 1e-2},
        "RMSProp": {"epsilon": 1e-2},
    }
    name = "SGD" if has_sparse else random.choice(list(kinds))
    more = kinds[name]
    if name in {"SGD", "Momentum"} and not has_sparse and random.randint(2):
        more["weight_decay"] = 0.01
    if name == "Lamb":
        parts = trained
    return getattr(paddle.optimizer, name)(rate, parameters=parts, grad_clip=clip, **more)


def square(out: Any) -> Any:
    return (out**2).mean()


def absolute(out: Any) -> Any:
    return functional.softplus(out).mean()


def drawn(seed: int) -> None:
    """Train what SEED draws."""
    random = np.random.RandomState(seed)
    paddle.seed(seed)
    net = Net(random)
    chosen = optimizer(random, net)
    has_unused = any(isinstance(block, Chosen) for block in net.blocks)
    model = parallel(net, find_unused_parameters=bool(random.randint(2)) or has_unused)
    # Other properties of the loop.
    has_second_loss, goes_back_twice, looks, no_sync = (random.randint(4) == 0 for _ in range(4))
    sets_to_zero, minimizes = bool(random.randint(2)), random.randint(4) == 0
    # Paddle's reducer crashes on sparse gradients that are added up.
    has_sparse = any(getattr(layer, "_sparse", False) for layer in net.sublayers())
    no_sync = no_sync and not has_sparse
    goes_back_twice = goes_back_twice and not has_sparse
    if net.repeated or any(isinstance(block, (Again, Sequence)) for block in net.blocks):
        # Paddle itself cannot run backward twice through these.
        goes_back_twice = False
    if isinstance(chosen._param_groups[0], dict):
        # Paddle's `minimize` does not support groups.
        minimizes = False
    for number, batch in enumerate(batches(WIDTH)):
        is_due = (number + 1) % options.accumulate == 0
        with model.no_sync() if no_sync and not is_due else contextlib.nullcontext():
            value = square(model(batch)) / options.accumulate
            if looks:
                with paddle.no_grad():
                    model(batch * 2.0)
            if goes_back_twice:
                (value * 0.5).backward(retain_graph=True)
            value.backward()
            if has_second_loss:
                (absolute(model(batch + 0.5)) / options.accumulate).backward()
        if is_due:
            if minimizes:
                chosen.minimize(value)
            else:
                chosen.step()
            chosen.clear_grad(set_to_zero=sets_to_zero)
            if not isinstance(chosen._learning_rate, float):
                chosen._learning_rate.step()
    say(f"drawn-{seed}", [net], Meter())
