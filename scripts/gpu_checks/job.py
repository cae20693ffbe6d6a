"""A rank that trains a small network for some steps, and writes down what came of it.

As a dynamic graph, with --static as a static one, with --o2 in 16 bits with master gradients; with
--stuck it begins an allreduce that the other ranks never join.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

# Paddle 3 reads it while it is imported, and cannot run fleet's static graphs otherwise.
if "--static" in sys.argv:
    os.environ["FLAGS_enable_pir_api"] = "0"

import numpy as np
import paddle
from paddle import nn
from paddle.base import core
from paddle.nn import functional

STEPS, ROWS = 8, 4
RANK = int(os.environ["PADDLE_TRAINER_ID"])
# Untyped as they are.
fleet: Any = paddle.distributed.fleet
static: Any = paddle.static
group_type: Any = core.ProcessGroup
FLOATS = (paddle.float16, paddle.bfloat16, paddle.float32)

# The group of each allreduce of floats at Paddle's process groups: gradients are floats, and what
# ranks agree on is in integers. Paddle's own reducer, which is C++, does not come by here.
calls: list[int] = []
plain = group_type.all_reduce


def all_reduce(group: Any, tensor: Any, *args: Any) -> Any:
    if tensor.dtype in FLOATS:
        calls.append(id(group))
    return plain(group, tensor, *args)


group_type.all_reduce = all_reduce


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Normalisation, convolutions and a sum with an activation: something for every field."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2D(1, 4, 3, padding=1, bias_attr=False)
        self.norm = nn.BatchNorm2D(4)
        self.deep = nn.Conv2D(4, 4, 3, padding=1, groups=4, bias_attr=False)
        self.wide = nn.Linear(256, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, images: Any) -> Any:  # noqa: D102
        first = functional.relu(self.norm(self.stem(images)))
        both = functional.relu(self.deep(first) + first)
        return self.last(functional.relu(self.wide(paddle.flatten(both, 1))))


random = np.random.RandomState(RANK)
images = random.randn(STEPS, ROWS, 1, 8, 8).astype("float32")
labels = random.randint(0, 4, (STEPS, ROWS)).astype("int64")


def weights(arrays: dict[str, Any]) -> dict[str, list[float]]:
    return {name: [float(number) for number in value.ravel()] for name, value in arrays.items()}


def train_dynamic() -> dict[str, Any]:
    """Train a dynamic graph."""
    paddle.distributed.init_parallel_env()
    net = Net()
    optimizer = paddle.optimizer.Momentum(0.01, parameters=net.parameters())
    is_half = "--o2" in sys.argv
    dtype = "bfloat16" if not paddle.is_compiled_with_cuda() else "float16"
    if is_half:
        net, optimizer = paddle.amp.decorate(
            net, optimizer, level="O2", dtype=dtype, master_grad=True
        )
    scaler = paddle.amp.GradScaler(enable=is_half and dtype == "float16")
    model = paddle.DataParallel(net) if paddle.distributed.get_world_size() > 1 else net
    per_step: list[int] = []
    groups = 0
    for part, wanted in zip(images, labels, strict=True):
        before = len(calls)
        with paddle.amp.auto_cast(is_half, level="O2", dtype=dtype):
            outputs = model(paddle.to_tensor(part))
        loss = functional.cross_entropy(outputs.astype("float32"), paddle.to_tensor(wanted))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        per_step.append(len(calls) - before)
        groups = len(set(calls[before:]))
    trained = {name: parameter for name, parameter in net.named_parameters() if parameter.trainable}
    return {
        "allreduces": per_step[-1],
        "groups": groups,
        "gradients": len(trained),
        "weights": weights(
            {n: parameter.astype("float32").numpy() for n, parameter in trained.items()}
        ),
    }


def train_static() -> dict[str, Any]:
    """Train a static graph."""
    paddle.enable_static()
    fleet.init(is_collective=True)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup):
        pixels = static.data("pixels", [None, 1, 8, 8])
        wanted = static.data("wanted", [None], "int64")
        loss = functional.cross_entropy(Net()(pixels), wanted)
        optimizer = paddle.optimizer.Momentum(0.01)
        fleet.distributed_optimizer(optimizer).minimize(loss, startup)
    executor = static.Executor()
    executor.run(startup)
    for part, right in zip(images, labels, strict=True):
        executor.run(main, feed={"pixels": part, "wanted": right}, fetch_list=[loss])
    scope = static.global_scope()
    trained = [parameter for parameter in main.all_parameters() if parameter.trainable]
    arrays = {
        parameter.name: np.array(scope.find_var(parameter.name).get_tensor())
        for parameter in trained
    }
    return {"gradients": len(trained), "weights": weights(arrays)}


def be_stuck() -> None:
    """Let rank 0 begin an allreduce that nobody joins."""
    paddle.distributed.init_parallel_env()
    while RANK:
        # The signal that asks for stacks wakes it, too.
        signal.pause()
    tensor = paddle.ones([1 << 20])
    paddle.distributed.all_reduce(tensor)
    print(float(tensor.sum()))


paddle.seed(5)
if "--stuck" in sys.argv:
    be_stuck()
else:
    report = train_static() if "--static" in sys.argv else train_dynamic()
    report["device"] = paddle.device.get_device()
    report["paddle"] = paddle.__version__
    folder = Path(os.environ["FLEETRUN_RUN_DIR"])
    (folder / f"trained.{RANK}.json").write_text(json.dumps(report), encoding="utf-8")
