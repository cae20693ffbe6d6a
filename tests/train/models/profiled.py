"""Trains four layers for some steps with a DataLoader; on request as a static graph."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import paddle
import paddle.distributed as dist
from paddle.io import DataLoader, TensorDataset

dist.init_parallel_env()
layers = [paddle.nn.Linear(64, 64) for _ in range(4)]
model = paddle.DataParallel(paddle.nn.Sequential(*layers))
optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
for (batch,) in DataLoader(TensorDataset([paddle.ones([12, 64])]), batch_size=2):
    model(batch).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
weight = float(layers[0].weight.sum())
Path(f"{os.environ['OUTPUT']}.{dist.get_rank()}").write_text(json.dumps(weight))
sys.stdout.flush()
