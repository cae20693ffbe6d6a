"""Trains for some steps; a layer and the script call collectives, and the second rank is late."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist


class Summed(paddle.nn.Linear):
    """A layer whose output is summed over all ranks."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - Paddle's name
        dist.all_reduce(paddle.ones([1]))
        return super().forward(input)


dist.init_parallel_env()
layer = Summed(64, 64)
model = paddle.DataParallel(layer)
optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
late_s = 0.05
for step in range(6):
    if dist.get_rank() == 1:
        time.sleep(late_s)
    begin_s = time.monotonic()
    dist.barrier()
    loss = model(paddle.ones([2, 64])).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    float(loss)
    # By more than a busy machine makes the other one late; the first step takes longest.
    late_s = max(late_s, 3 * (time.monotonic() - begin_s) if step else 0.0)
Path(f"{os.environ['OUTPUT']}.{dist.get_rank()}").write_text(json.dumps(float(layer.weight.sum())))
