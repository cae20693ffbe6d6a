"""Trains models whose script gives the sizes of buckets, and one without."""

from typing import Any

import paddle
from paddle import nn
from twins import write

paddle.distributed.init_parallel_env()
SIZES: Any = ({}, {"comm_buffer_size": 0.0008}, {"last_comm_buffer_size": 0.0004})
# All of them stay alive, and are counted.
models = []
for sizes in SIZES:
    # Four weights of 16 x 4 numbers and their biases, of four bytes each.
    net = nn.Sequential(
        *(nn.Linear(16, 4) if place % 2 else nn.Linear(4, 16) for place in range(4))
    )
    models.append(paddle.DataParallel(net, **sizes))
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    models[-1](paddle.ones([2, 4])).mean().backward()
    optimizer.step()
write([])
