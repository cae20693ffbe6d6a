"""Trains with faulty allreduces, or a faulty rank, in WAYS that a test names.

Reports for each way the error that stops the script.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base import core
from twins import rank, write

paddle.distributed.init_parallel_env()
plain = core.ProcessGroup.all_reduce
way = "right"
# By group: a collective that waits until the group's next one has begun.
held: dict[int, Begun] = {}


class Begun:
    """Waits for a sum of TENSOR, and corrupts it."""

    def __init__(self, group: Any, tensor: Any, args: tuple[Any, ...]) -> None:
        self._call, self._tensor = (group, tensor, *args), tensor
        self._task: Any = None

    def begin(self) -> None:
        """Begin the collective."""
        self._task = plain(*self._call)

    def wait(self) -> None:
        """Wait."""
        if way == "unwaited":
            return
        self._task.wait()
        with paddle.no_grad():
            if way == "twice":
                self._tensor.scale_(2.0)
            elif way == "infinite":
                self._tensor.scale_(float("inf"))
            elif way == "one":
                self._tensor.scale_(1.0 if self._tensor.size > 9 else 1.001)


def spoilt(group: Any, tensor: Any, *args: Any) -> Any:
    """Begin an allreduce in the current way; swaps and frees happen on rank 1 only."""
    if tensor.dtype != paddle.float32:
        return plain(group, tensor, *args)
    if rank and way == "freed":
        copy = tensor.clone()
        task = plain(group, copy, *args)
        copy.get_tensor()._clear()
        return task
    begun = Begun(group, tensor, args)
    if rank and way == "swapped" and id(group) not in held:
        held[id(group)] = begun
        return begun
    begun.begin()
    if id(group) in held:
        held.pop(id(group)).begin()
    return begun


setattr(core.ProcessGroup, "all_reduce", spoilt)
report = {}
for way in os.environ["WAYS"].split():
    paddle.seed(5)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters())
    report[way] = ""
    for _ in range(4):
        batch = np.random.RandomState(rank).randn(4, 6).astype("float32")
        if way == "nan" and rank:
            batch[0, 0] = np.nan
        if way == "perturbed" and rank:
            net[0].weight.set_value(net[0].weight * 1.001)
        loss = (model(paddle.to_tensor(batch)) ** 2).mean()
        try:
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            report[way] = str(error)
            break
        optimizer.clear_grad()
write(report)
