"""Counts the work of injected Python code in a training step of a model with 300 gradients.

That is its calls, and its looks at the versions of tensors, which take no call.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

STEPS = 8
rank = int(os.environ["PADDLE_TRAINER_ID"])
paddle.distributed.init_parallel_env()
net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(150)))
model: Any = paddle.DataParallel(net)
optimizer: Any = paddle.optimizer.SGD(0.001, parameters=net.parameters())
batch = paddle.to_tensor(np.random.RandomState(rank).randn(3, 4).astype("float32"))
calls = looks = 0
kind: Any = core.eager.Tensor
version: Any = kind.inplace_version


def look(tensor: Any) -> int:
    """Return the version of TENSOR; count."""
    global looks  # noqa: PLW0603 - a script
    looks += 1
    return int(version.__get__(tensor))


def count(frame: Any, event: str, _: Any) -> None:
    """Count a call of a function of the package `inject`."""
    global calls  # noqa: PLW0603 - a script
    calls += event == "call" and "/fleetrun/inject/" in frame.f_code.co_filename


def step() -> None:
    """Train one step."""
    (model(batch) ** 2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()


# Ranks are compared after update 16, and not again before update 32.
for _ in range(17):
    step()
kind.inplace_version = property(look)
sys.setprofile(count)
for _ in range(STEPS):
    step()
sys.setprofile(None)
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(
    json.dumps({"calls": calls / STEPS, "looks": looks})
)
