"""Trains with a GradScaler that skips all updates of a float16 model, or a float32 one's first.

LEVEL is O2 or O1. Gradients of float16 weights are unscaled in float32, as master gradients.
"""

from __future__ import annotations

import os
from math import inf
from typing import Any

import paddle
from paddle import nn
from twins import batches, rank, weights, write


class Scaled(nn.Layer):
    """Multiplies and adds elementwise: CPUs have no float16 matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = self.create_parameter([16])
        self.bias = self.create_parameter([16], is_bias=True)

    def forward(self, rows: Any) -> Any:
        return rows * self.factor + self.bias


paddle.distributed.init_parallel_env()
paddle.seed(5)
net: Any = nn.Sequential(Scaled(), Scaled())
optimizer: Any = paddle.optimizer.SGD(0.1, parameters=net.parameters())
level: Any = os.environ["LEVEL"]
if level == "O2":
    net, optimizer = paddle.amp.decorate(net, optimizer, "O2", "float16", master_grad=True)
model: Any = paddle.DataParallel(net)
before = weights(net)
drawn = batches([rank], 4, 16)
# No gradient is finite, as with a scale that is far too large.
for scale in (inf, inf, inf, inf if level == "O2" else 1.0):
    scaler = paddle.amp.GradScaler(init_loss_scaling=scale, use_dynamic_loss_scaling=False)
    with paddle.amp.auto_cast(level=level, dtype="float16"):
        loss = (model(next(drawn)).cast("float32") ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
write(
    {
        "dtypes": sorted({parameter.dtype.name for parameter in net.parameters()}),
        "is_scaled": scaler.is_enable(),
        "moved": weights(net) != before,
    }
)
