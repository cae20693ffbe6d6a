"""Counts who reads a tensor on the host, or waits for the device, in each step of a training.

On a GPU each such read blocks the host until the device is done. The report has the reads by
fleetrun's own code in each step, by the name of the method.
"""

import os
import sys
from typing import Any

import paddle
from paddle import nn
from twins import write

READS = ("numpy", "item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu")
STEPS = 12
reads: list[list[str]] = []
tensor: Any = paddle.Tensor


def watched(name: str, plain: Any) -> Any:
    def read(*args: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        if os.sep + "inject" + os.sep in frame.f_code.co_filename:
            reads[-1].append(f"{name} in {frame.f_code.co_name}")
        return plain(*args, **options)

    return read


for name in READS:
    if hasattr(tensor, name):
        setattr(tensor, name, watched(name, getattr(tensor, name)))

paddle.distributed.init_parallel_env()
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model = paddle.DataParallel(net)
optimizer = paddle.optimizer.Momentum(0.1, parameters=net.parameters())
for _ in range(STEPS):
    reads.append([])
    model(paddle.randn([5, 4])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
write(reads)
