"""Trains while the check that FAULT names, if any, fails; reports weights and remarks.

FAULT is a JSON object: `where` is a function of fleetrun with its module; `rank`, if given, is the
only rank where it fails. Without it nothing fails.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

rank = int(os.environ["PADDLE_TRAINER_ID"])
import paddle

fault = json.loads(os.environ.get("FAULT", "{}"))
border: Any = sys.modules["_fleetrun_inject.border"]
remarks: list[str] = []
border.on_remark(remarks.append)


def broken(*_: Any, **__: Any) -> Any:
    raise ValueError("(NotFound) it is broken")


if fault and fault.get("rank", rank) == rank:
    module, _, name = fault["where"].rpartition(".")
    setattr(sys.modules[f"_fleetrun_inject.{module}"], name, broken)

paddle.distributed.init_parallel_env()
nn = paddle.nn
net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 1))
for place, parameter in enumerate(net.parameters()):
    parameter.set_value(
        np.random.RandomState(place).randn(*parameter.shape).astype("float32") * 0.3
    )
model = paddle.DataParallel(net)
optimizer = paddle.optimizer.Momentum(0.05, parameters=net.parameters())
for step in range(12):
    batch = np.random.RandomState(100 * rank + step).randn(4, 6).astype("float32")
    loss = (model(paddle.to_tensor(batch)) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()

result = {"weights": [parameter.numpy().ravel().tolist() for parameter in net.parameters()]}
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps({**result, "remarks": remarks}))
