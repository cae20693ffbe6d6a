"""Trains models with strided gradients, used in different ways, beside one process with all rows.

Reports the weights of each, and those of the one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn
from twins import batches, compare, rank, train, write

if TYPE_CHECKING:
    from collections.abc import Callable

paddle.distributed.init_parallel_env()


class Adapted(nn.Layer):  # type: ignore[misc, unused-ignore]
    """A frozen layer with a trained adapter: two small layers, the second zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(8, 6), nn.Linear(6, 2)
        for parameter in self.base.parameters():
            parameter.stop_gradient = True
        zeros = nn.initializer.Constant(0.0)
        self.down = self.create_parameter([4, 8])
        self.up = self.create_parameter([6, 4], default_initializer=zeros)

    def forward(self, x: Any) -> Any:
        return self.head(self.base(x) + x @ self.down.T @ self.up.T)


class Weighted(nn.Layer):  # type: ignore[misc, unused-ignore]
    """One matrix, used in a given way."""

    def __init__(self, use: Callable[[Any, Any], Any], *shape: int) -> None:
        super().__init__()
        self.use, self.bias = use, self.create_parameter([1], is_bias=True)
        self.weight = self.create_parameter(list(shape))

    def forward(self, x: Any) -> Any:
        return self.use(x, self.weight) + self.bias


def unlike(x: Any, weight: Any) -> Any:
    """Transpose on one rank only: gradients of the two ranks differ in layout."""
    multiply: Any = paddle.matmul
    return x @ weight.T if rank else multiply(x, weight, transpose_y=True)


def contract(x: Any, weight: Any) -> Any:
    """Multiply by the transpose of a transpose."""
    product: Any = paddle.einsum("bi,io->ob", x, weight.T)
    return product.T


def hooked() -> Any:
    """Return a layer whose gradient is every second row of something larger."""
    net = Weighted(lambda x, weight: x @ weight, 8, 2)

    def every_second(gradient: Any) -> Any:
        twice: Any = paddle.stack([gradient, -gradient], axis=1)
        return twice[:, 0]

    net.weight.register_hook(every_second)
    return net


KINDS: dict[str, Callable[[], Any]] = {
    "adapted": Adapted,
    "permuted": lambda: Weighted(
        lambda x, weight: x @ weight.transpose([1, 0, 2]).reshape([8, 6]), 2, 8, 3
    ),
    "contracted": lambda: Weighted(contract, 3, 8),
    "sliced": lambda: Weighted(lambda x, weight: x @ weight[:3, ::2].T, 5, 16),
    "unlike": lambda: Weighted(unlike, 3, 8),
    "hooked": hooked,
}


def train_by(model: Any, ranks: list[int]) -> Any:
    return train(model, batches(ranks, 4, 8), 5, kind=paddle.optimizer.Momentum)


write({name: compare(make, train_by) for name, make in KINDS.items()})
