"""Trains while the checks that FAULT names fail; reports weights and remarks.

FAULT is a JSON object: `where` is a function of fleetrun with its module, or empty for every call
across the border; without it nothing fails. `rank`, if given, is the only rank where it fails.
`scaled`, `fleet` and `trainer` are what the script also does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

rank = int(os.environ["PADDLE_TRAINER_ID"])
if "FLEETRUN_FLIGHT_RECORDER" in os.environ:
    os.environ["FLEETRUN_FLIGHT_RECORDER"] += f".{rank}"

import paddle

fault = json.loads(os.environ.get("FAULT", "{}"))
border: Any = sys.modules["_fleetrun_inject.border"]
remarks: list[str] = []
border.on_remark(remarks.append)


def broken(*_: Any, **__: Any) -> Any:
    raise ValueError("(NotFound) it is broken")


if "where" in fault and fault.get("rank", rank) == rank:
    if fault["where"]:
        module, _, name = fault["where"].rpartition(".")
        setattr(sys.modules[f"_fleetrun_inject.{module}"], name, broken)
    else:
        border._call = broken

paddle.distributed.init_parallel_env()
strategy: Any = paddle.distributed.fleet.DistributedStrategy()
if "fleet" in fault:
    paddle.distributed.fleet.init(is_collective=True)
if "trainer" in fault:
    package = Path(f"{os.environ['OUTPUT']}.{rank}.modules")
    (package / "paddleformers" / "trainer").mkdir(parents=True)
    text = "class Trainer:\n    args = None\n    def train(self): ...\n"
    (package / "paddleformers" / "trainer" / "trainer.py").write_text(text)
    sys.path.append(str(package))
    importlib.import_module("paddleformers.trainer.trainer").Trainer().train()
nn = paddle.nn
net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 1))
for place, parameter in enumerate(net.parameters()):
    parameter.set_value(
        np.random.RandomState(place).randn(*parameter.shape).astype("float32") * 0.3
    )
model = paddle.DataParallel(net)
optimizer = paddle.optimizer.Momentum(0.05, parameters=net.parameters())
scaler = paddle.amp.GradScaler(enable=True, init_loss_scaling=4.0)
for step in range(12):
    batch = np.random.RandomState(100 * rank + step).randn(4, 6).astype("float32")
    loss = (model(paddle.to_tensor(batch)) ** 2).mean()
    if fault.get("scaled"):
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    optimizer.clear_grad()

result = {"weights": [parameter.numpy().ravel().tolist() for parameter in net.parameters()]}
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps({**result, "remarks": remarks}))
