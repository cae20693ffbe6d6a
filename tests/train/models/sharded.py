"""Trains with sharding stage 1, whose optimizer updates its shard by `_apply_optimize`."""

from __future__ import annotations

import sys
from typing import Any

import paddle
from twins import batches, rank, write

fleet: Any = paddle.distributed.fleet
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "sharding_degree": 2}
fleet.init(is_collective=True, strategy=strategy)
net = paddle.nn.Sequential(paddle.nn.Linear(8, 6), paddle.nn.Linear(6, 4))
model = fleet.distributed_model(net)
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
for _, batch in zip(range(6), batches([rank], 4, 8), strict=False):
    (model(batch) ** 2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
count = sys.modules["_fleetrun_inject.updates"].count()
write({"updates": count, "inner": type(optimizer._inner_opt).__name__})
