"""More kinds of models that one process can also train alone: see `kinds.py`."""

from __future__ import annotations

from typing import Any

import learning
import paddle
from learning import KINDS, MICRO, UPDATES, batches, learn, trained, words
from paddle import nn
from paddle.nn import functional
from paddle.optimizer import SGD, Adam, Momentum


@trained(6)
class Lora(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Frozen layers with adapters of rank two, which are used transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        for parameter in self.parameters():
            parameter.stop_gradient = True
        self.down, self.up = self.create_parameter([2, 6]), self.create_parameter([8, 2])

    def forward(self, x: Any) -> Any:
        return self.last(paddle.tanh(self.base(x) + 2.0 * (x @ self.down.T @ self.up.T)))


@trained(1, 8, 8)
class Upsampled(nn.Layer):  # type: ignore[misc, unused-ignore]
    """A convolution, its transpose, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2D(1, 4, 3, stride=2, padding=1)
        self.deep = nn.Conv2D(4, 4, 3, padding=1, groups=4)
        self.up = nn.Conv2DTranspose(4, 2, 2, stride=2)
        self.last = nn.Conv2D(3, 1, 1)

    def forward(self, x: Any) -> Any:
        deep = functional.relu(self.deep(self.down(x)))
        return self.last(paddle.concat([x, self.up(deep)], 1))


@trained(5, 8)
class Heads(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Attention by einsum, with weights of three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (self.create_parameter([8, 2, 4]) for _ in range(3))
        self.out = self.create_parameter([2, 4, 8])

    def forward(self, x: Any) -> Any:
        by_head: list[Any] = [
            paddle.einsum("bsi,ihd->bhsd", x, projection)
            for projection in (self.query, self.key, self.value)
        ]
        scores: Any = functional.softmax(by_head[0] @ by_head[1].transpose([0, 1, 3, 2]) / 2.0)
        mixed: Any = paddle.einsum("bhst,bhtd->bshd", scores, by_head[2])
        return paddle.einsum("bshd,hdo->bso", mixed, self.out)


@trained(5, 4)
class Recurrent(nn.Layer):  # type: ignore[misc, unused-ignore]
    """A bidirectional layer, and a cell that is unrolled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.LSTM(4, 3, num_layers=2, direction="bidirect")
        self.gated, self.cell = nn.GRU(6, 5), nn.SimpleRNNCell(5, 4)

    def forward(self, x: Any) -> Any:
        hidden, _ = self.gated(self.both(x)[0])
        out = state = None
        for step in range(hidden.shape[1]):
            out, state = self.cell(hidden[:, step], state)
        return out


@trained(6)
class Normed(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Weights that are computed from others before each use, and a norm per row."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.utils.spectral_norm(nn.Linear(6, 8), n_power_iterations=2)
        self.scaled = nn.utils.weight_norm(nn.Linear(8, 8))
        self.by_row, self.by_group = nn.LayerNorm(8), nn.GroupNorm(2, 8)

    def forward(self, x: Any) -> Any:
        return self.by_group(self.by_row(self.scaled(paddle.tanh(self.spectral(x)))))


@trained(6)
class Powers(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Small parameters of all kinds: a scalar, one per channel, a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.form = nn.PReLU(4), nn.Bilinear(6, 6, 4)
        self.temperature = self.create_parameter(
            [1], default_initializer=nn.initializer.Constant(0.5)
        )
        self.several = nn.ParameterList([self.create_parameter([4]) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        out = self.slope(self.form(x, x)) * paddle.exp(self.temperature)
        for scale in self.several:
            out = out * (1.0 + scale)
        return out


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


@trained(6)
class Weighing(nn.Layer):  # type: ignore[misc, unused-ignore]
    """A hypernetwork: one layer computes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = self.create_parameter([6, 3])
        self.generator = nn.Linear(3, 4)

    def forward(self, x: Any) -> Any:
        return paddle.tanh(x @ self.generator(self.codes))


def _twofold_loss(model: Any, batch: Any) -> Any:
    out = model(x=batch)
    return out["likeness"].mean() + (out["head"][0] ** 2).mean()


@trained(6, loss=_twofold_loss, find_unused_parameters=True)
class Twofold(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Applies the same layers twice, and returns a dictionary that is used in part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.idle = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, *, x: Any) -> dict[str, Any]:
        hidden, flipped = self.body(x), self.body(paddle.flip(x, [1]))
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
class Uneven(nn.Layer):  # type: ignore[misc, unused-ignore]
    """One weight, larger than all others together, between small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.LayerList([nn.Linear(6, 6) for _ in range(4)])
        self.large = nn.Linear(6, 500, bias_attr=False)

    def forward(self, x: Any) -> Any:
        for layer in list(self.small)[:2]:
            x = paddle.tanh(layer(x))
        wide = self.large(x)
        for layer in list(self.small)[2:]:
            x = x + layer(x)
        return paddle.concat([x, wide * 0.1], -1)


class Reversed(paddle.autograd.PyLayer):  # type: ignore[misc, unused-ignore]
    """Reverses the sign of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any) -> Any:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        gradient = args[0]
        x, scale = ctx.saved_tensor()
        return -gradient * scale, (gradient * x).sum(0)


@trained(6)
class Adversary(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Reverses gradients in a custom operator of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.scale = self.create_parameter([6], default_initializer=nn.initializer.Constant(0.5))

    def forward(self, x: Any) -> Any:
        hidden = paddle.tanh(self.body(x))
        apply: Any = Reversed.apply
        return self.label(hidden) + self.domain(apply(hidden, self.scale))


@trained(6)
class Rounded(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Rounds its weights as quantisation does, and lets gradients pass; 8-bit ones are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        table = paddle.arange(16, dtype="int32").reshape([8, 2])
        self.frozen = paddle.create_parameter([8, 2], "float32")
        self.frozen.stop_gradient = True
        self.register_buffer("table", table.astype("int8"))

    def forward(self, x: Any) -> Any:
        weight: Any = self.first.weight
        rounded = weight + ((weight * 16).round() / 16 - weight).detach()
        hidden = x @ rounded + self.first.bias
        return self.last(hidden) + hidden @ (self.table.astype("float32") / 16)


@trained(8)
class Frequencies(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Multiplies frequencies: complex activations, real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = self.create_parameter([5]), self.create_parameter([5])
        self.last = nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        spectrum: Any = paddle.fft.rfft(x)
        return self.last(paddle.fft.irfft(spectrum * paddle.complex(self.real, self.imaginary)))


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


@trained(6, loss=lambda model, batch: model(batch))
class Losing(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Computes its own loss, of several terms weighted by parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.weights = self.create_parameter([2], is_bias=True)

    def forward(self, x: Any) -> Any:
        out = self.body(x)
        terms = paddle.stack([(out**2).mean(), (out - x).abs().mean()])
        return (terms * paddle.exp(-self.weights) + self.weights).sum()


@trained(6)
class Ordered(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Sorts, takes the largest, splits and concatenates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(5, 2)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        top: Any = paddle.topk(hidden, 3)[0]
        ordered: Any = paddle.sort(hidden, axis=-1)
        return self.last(paddle.concat([top, ordered[:, :2]], -1))


class Padded(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Adds up embeddings, with padding; and uses the table as a dense weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, padding_idx=0)
        self.order, self.last = nn.Embedding(5, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        bag = self.table(x).sum(1) + self.order(paddle.arange(5)).mean(0)
        table: Any = self.table.weight
        return self.last(bag) + (table**2).mean()


def padded() -> None:
    paddle.seed(5)
    net = Padded()
    learn("padded", net, SGD(0.1, parameters=net.parameters()), words(20))


@trained(6, find_unused_parameters=True)
class Deepened(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Skips layers in some steps, the same ones on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([nn.Linear(6, 6) for _ in range(3)])
        self.step = 0

    def forward(self, x: Any) -> Any:
        # All micro-steps of an update skip the same layers.
        for place, block in enumerate(self.blocks):
            if place == 0 or (self.step // MICRO + place) % 2:
                x = x + paddle.tanh(block(x))
        self.step += 1
        return x


@trained(6)
class Solved(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Iterates the same weight towards a fixed point."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        state = paddle.zeros_like(x)
        for _ in range(6):
            state = paddle.tanh(0.5 * self.inner(state) + x)
        return self.outer(state)


@trained(6)
class Adapting(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Takes an inner step of learning for each row in forward, and differentiates through it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([6, 6])
        self.rate = self.create_parameter([1], default_initializer=nn.initializer.Constant(0.1))

    def forward(self, x: Any) -> Any:
        weights = paddle.tile(self.weight.unsqueeze(0), [x.shape[0], 1, 1])
        inner = ((x.unsqueeze(1) @ weights) ** 2).mean([1, 2]).sum()
        slope: Any = paddle.grad(inner, weights, create_graph=True)
        return (x.unsqueeze(1) @ (weights - self.rate * slope[0])).squeeze(1)


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


def late_adam() -> None:
    """Train a copy of a net that was trained before, with its hooks and buffers."""
    import copy  # for this kind only

    paddle.seed(5)
    net = Normed()
    learn("late_adam", net, SGD(0.05, parameters=net.parameters()), batches(6))
    other = copy.deepcopy(net)
    optimizer = Adam(0.01, parameters=other.parameters(), epsilon=1e-3)
    learn("late_adam", other, optimizer, batches(6))


class Quantised(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Rounds its weights with Paddle's quantiser, which writes its scales."""

    def __init__(self) -> None:
        super().__init__()
        from paddle.quantization import QAT, QuantConfig, quanters

        quanter: Any = quanters.FakeQuanterWithAbsMaxObserver
        config = QuantConfig(activation=None, weight=quanter(moving_rate=0.9))
        inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.inner: Any = QAT(config).quantize(inner)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def quantised() -> None:
    paddle.seed(5)
    net = Quantised()
    learn("quantised", net, SGD(0.1, parameters=net.inner.parameters()), batches(6))


KINDS.update({train.__name__: train for train in (mixed, padded, each_rank, late_adam, quantised)})
