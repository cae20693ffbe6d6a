"""Trains with allreduces that go wrong in the same way on all ranks, which stay equal.

Reports what the script is stopped with, for each way.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

rank = int(os.environ["PADDLE_TRAINER_ID"])
paddle.distributed.init_parallel_env()
plain = core.ProcessGroup.all_reduce
way = "right"


class Late:
    """Waits for a sum, and spoils it."""

    def __init__(self, task: Any, tensor: Any) -> None:
        self._task, self._tensor = task, tensor

    def wait(self) -> None:
        """Wait."""
        self._task.wait()
        with paddle.no_grad():
            if way == "twice":
                self._tensor.scale_(2.0)
            elif way == "infinite":
                self._tensor.scale_(float("inf"))
            elif way == "one":
                self._tensor.scale_(1.0 if self._tensor.size > 9 else 1.001)


def spoilt(group: Any, tensor: Any, *args: Any) -> Any:
    task = plain(group, tensor, *args)
    return Late(task, tensor) if tensor.dtype == paddle.float32 else task


setattr(core.ProcessGroup, "all_reduce", spoilt)
report = {}
for way in ("right", "nan", "twice", "infinite", "one"):
    paddle.seed(5)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters())
    report[way] = ""
    for _ in range(4):
        batch = np.random.RandomState(rank).randn(4, 6).astype("float32")
        if way == "nan" and rank:
            batch[0, 0] = np.nan
        loss = (model(paddle.to_tensor(batch)) ** 2).mean()
        try:
            loss.backward()
        except RuntimeError as error:
            report[way] = str(error)
            break
        optimizer.step()
        optimizer.clear_grad()
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
