"""Trains a model whose script says how large the buckets are, and one whose script does not."""

from typing import Any

import paddle
from paddle import nn
from twins import write  # type: ignore[import-not-found, unused-ignore]

paddle.distributed.init_parallel_env()
SIZES: Any = ({}, {"comm_buffer_size": 0.0008}, {"last_comm_buffer_size": 0.0004})
# All of them live, and are counted.
models = []
for sizes in SIZES:
    # Four times 16 times 4 and 4 numbers, of four bytes.
    net = nn.Sequential(
        *(nn.Linear(16, 4) if place % 2 else nn.Linear(4, 16) for place in range(4))
    )
    models.append(paddle.DataParallel(net, **sizes))
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    models[-1](paddle.ones([2, 4])).mean().backward()
    optimizer.step()
write([])
