"""Trains a network on which every field can act: as a dynamic graph, or with --static.

With --each FIELD... it tries each field by itself, and prints how Paddle stopped. These stop before
a rank waits for another, so one rank will do.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# Otherwise Paddle 3 cannot run fleet's static graphs.
if "--static" in sys.argv:
    os.environ["FLAGS_enable_pir_api"] = "0"

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

# Paddle has no types for these.
fleet: Any = paddle.distributed.fleet
static: Any = paddle.static
STEPS = 4
kind = paddle.optimizer.Adam if "--adam" in sys.argv else paddle.optimizer.Momentum


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Normalisation and activation, depthwise convolution, sum and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2D(1, 4, 3, padding=1, bias_attr=False)
        self.norm = nn.BatchNorm2D(4)
        self.deep = nn.Conv2D(4, 4, 3, padding=1, groups=4, bias_attr=False)
        self.wide = nn.Linear(256, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, images: Any) -> Any:
        first = functional.relu(self.norm(self.stem(images)))
        both = functional.relu(self.deep(first) + first)
        return self.last(functional.relu(self.wide(paddle.flatten(both, 1))))


random = np.random.RandomState(int(os.environ["PADDLE_TRAINER_ID"]))
images = random.randn(STEPS, 4, 1, 8, 8).astype("float32")
labels = random.randint(0, 4, (STEPS, 4)).astype("int64")


def train_dynamic() -> None:
    """Train a dynamic graph, with fleet if that is initialised."""
    net = Net()
    if "--plain" in sys.argv:
        model, optimizer = paddle.DataParallel(net), kind(0.01, parameters=net.parameters())
    else:
        model = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(kind(0.01, parameters=net.parameters()))
    for part, wanted in zip(images, labels, strict=True):
        outputs = model(paddle.to_tensor(part))
        functional.cross_entropy(outputs, paddle.to_tensor(wanted)).backward()
        optimizer.step()
        optimizer.clear_grad()


def train_static() -> None:
    """Train a static graph."""
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup):
        pixels = static.data("pixels", [None, 1, 8, 8])
        wanted = static.data("wanted", [None], "int64")
        loss = functional.cross_entropy(Net()(pixels), wanted)
        fleet.distributed_optimizer(kind(0.01)).minimize(loss, startup)
    executor = static.Executor()
    executor.run(startup)
    for part, right in zip(images, labels, strict=True):
        executor.run(main, feed={"pixels": part, "wanted": right}, fetch_list=[loss])


def try_each(names: list[str]) -> None:
    """Let the script itself turn on each of NAMES in turn."""
    for name in names:
        strategy = fleet.DistributedStrategy()
        try:
            if hasattr(strategy, name):
                setattr(strategy, name, True)
            else:
                build = static.BuildStrategy()
                setattr(build, name, True)
                strategy.build_strategy = build
            fleet.init(is_collective=True, strategy=strategy)
            train_static()
        except Exception as error:  # Paddle raises all kinds
            message = " ".join(str(error).split())
            print(f"{name} stopped: {type(error).__name__}: {message}", flush=True)


if "--static" in sys.argv:
    paddle.enable_static()
if "--each" in sys.argv:
    try_each(sys.argv[sys.argv.index("--each") + 1 :])
    sys.exit()
if "--plain" in sys.argv:
    paddle.distributed.init_parallel_env()
else:
    fleet.init(is_collective=True)
(train_static if "--static" in sys.argv else train_dynamic)()
