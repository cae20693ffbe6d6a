"""Trains a net of odd sizes beside one process with the batches of all ranks, on any device.

Unless STRAIGHT, one weight is used transposed and its gradient is strided; with UNUSED rank 0 lacks
some gradients. MICRO_STEPS make an update. With FLEET, fleet initialises the ranks; with ELSEWHERE
the CPU is the default device in backwards. Reports both weights and their places.
"""

from __future__ import annotations

import os
from typing import Any

import paddle
from paddle import nn
from paddle.distributed import fleet
from twins import batches, elsewhere, rank, twins, weights, write

nranks = int(os.environ["PADDLE_TRAINERS_NUM"])
has_unused = bool(os.environ.get("UNUSED"))
is_straight = bool(os.environ.get("STRAIGHT"))
micro_steps = int(os.environ.get("MICRO_STEPS", "1"))
UPDATES = 4
if os.environ.get("FLEET"):
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
else:
    paddle.distributed.init_parallel_env()


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Layers that start at odd offsets of a buffer without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 37)
        self.turned = self.create_parameter([9, 37])
        self.seldom = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)

    def forward(self, x: Any, *, uses_all: bool = True) -> Any:
        """Return three numbers for each row of X."""
        x = paddle.tanh(self.first(x))
        multiply: Any = paddle.matmul
        x = multiply(x, self.turned, transpose_y=True) if is_straight else x @ self.turned.T
        return self.last(paddle.tanh(self.seldom(x) + x if uses_all else x))


def loss(net: Any, x: Any, owner: int) -> Any:
    """Return the loss of NET with the batch X of the rank OWNER."""
    return (net(x, uses_all=bool(owner) or not has_unused) ** 2).mean()


net, alone = twins(Net)
model = paddle.DataParallel(net, find_unused_parameters=has_unused)
# Equals SGD, but has fused kernels.
optimizer = paddle.optimizer.Momentum(0.05, 0.0, parameters=net.parameters())
drawn = [batches([rank], 4, 5) for rank in range(nranks)]
for _ in range(UPDATES):
    for _ in range(micro_steps):
        xs = [next(stream) for stream in drawn]
        own = loss(model, xs[rank], rank)
        with elsewhere():
            own.backward()
            optimizer.step()
            optimizer.clear_grad()
        for owner, x in enumerate(xs):
            (loss(alone, x, owner) / (nranks * micro_steps)).backward()
    with paddle.no_grad():
        # By hand, because merged optimizers would wait for more micro-steps.
        for parameter in alone.parameters():
            if parameter.grad is not None:
                parameter.set_value(parameter - 0.05 * parameter.grad)
            parameter.clear_gradient(set_to_zero=False)
write({"weights": weights(net), "alone": weights(alone), "place": str(net.last.weight.place)})
