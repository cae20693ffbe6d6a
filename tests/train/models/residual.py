"""Trains a small residual network: a dynamic graph with plain data parallel, or fleet's --static.

It does not mention a strategy. Each argument BATCHxSTEPS is a training, with BATCH samples per step
over all ranks. `made.<rank>.json` has the weights, and the counts of this script: calls of
communicators from Python, optimizer kernels of dynamic graphs, operators of static programs.
With --linger backward does not end before a gradient was sent; with --bias, convolutions have one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

# Otherwise Paddle 3 cannot run fleet's static graphs.
if "--static" in sys.argv:
    os.environ["FLAGS_enable_pir_api"] = "0"

import numpy as np
import paddle
from paddle import nn
from paddle.base import core
from paddle.distributed import get_rank, get_world_size
from paddle.nn import functional

# Paddle has no types for these.
fleet: Any = paddle.distributed.fleet
static: Any = paddle.static
RATE = 0.05
is_static = "--static" in sys.argv
trainings = [tuple(map(int, word.split("x"))) for word in sys.argv[1:] if "x" in word]
# The calls of communicators in this step: the method, which communicator, how many numbers.
heard: list[tuple[str, int, int]] = []
sent = threading.Event()
groups: list[Any] = []


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Convolutions, one of them with a skip connection, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        bias = None if "--bias" in sys.argv else False
        self.stem = nn.Conv2D(1, 8, 3, padding=1, bias_attr=bias)
        self.block = nn.Conv2D(8, 8, 3, padding=1, bias_attr=bias)
        self.wide = nn.Linear(512, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, images: Any) -> Any:
        first = functional.relu(self.stem(images))
        both = functional.relu(self.block(first) + first)
        return self.last(functional.relu(self.wide(paddle.flatten(both, 1))))


def listen(name: str) -> None:
    """Note each call of the method NAME of Paddle's communicators."""
    plain = getattr(core.ProcessGroup, name)

    def noted(group: Any, tensor: Any, *args: Any) -> Any:
        if not any(group is known for known in groups):
            groups.append(group)
        number = next(at for at, known in enumerate(groups) if group is known)
        heard.append((name, number, int(tensor.size)))
        sent.set()
        return plain(group, tensor, *args)

    setattr(core.ProcessGroup, name, noted)


class Kernels:
    """Counts the operations that Paddle's Momentum calls."""

    def __init__(self, operations: Any) -> None:
        self._operations = operations
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if "momentum" in name:
            self.calls.append(name)
        return getattr(self._operations, name)


def batches(size: int, steps: int) -> list[tuple[Any, Any]]:
    """Return this rank's share of STEPS batches; all trainings see the same samples."""
    random = np.random.RandomState(1)
    images = random.randn(size * steps, 1, 8, 8).astype("float32")
    labels = random.randint(0, 10, size * steps).astype("int64")
    share = size // get_world_size()
    begins = [step * size + get_rank() * share for step in range(steps)]
    return [(images[at : at + share], labels[at : at + share]) for at in begins]


def train_dynamic(size: int, steps: int) -> dict[str, Any]:
    """Train a dynamic graph."""
    net = Net()
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.Momentum(RATE, parameters=model.parameters())
    calls: list[Any] = []
    kernels: list[Any] = []
    early: list[bool] = []
    if "--linger" in sys.argv:
        # The gradient that backward computes last; the first backward sends nothing before its end.
        net.stem.weight.register_hook(lambda _: early.append(not calls or sent.wait(20)))
    for images, labels in batches(size, steps):
        heard.clear()
        sent.clear()
        counted.calls.clear()
        outputs = model(paddle.to_tensor(images))
        functional.cross_entropy(outputs, paddle.to_tensor(labels)).backward()
        calls.append(list(heard))
        optimizer.step()
        kernels.append(list(counted.calls))
        optimizer.clear_grad()
    weights = [parameter.numpy().tolist() for parameter in net.parameters()]
    return {"weights": weights, "calls": calls, "kernels": kernels, "early": early}


def train_static(size: int, steps: int) -> dict[str, Any]:
    """Train a static graph."""
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup):
        images = static.data("images", [None, 1, 8, 8])
        labels = static.data("labels", [None], "int64")
        net = Net()
        loss = functional.cross_entropy(net(images), labels)
        optimizer = paddle.optimizer.Momentum(RATE)
        fleet.distributed_optimizer(optimizer).minimize(loss, startup)
    executor = static.Executor()
    executor.run(startup)
    calls = []
    for part, wanted in batches(size, steps):
        heard.clear()
        executor.run(main, feed={"images": part, "labels": wanted}, fetch_list=[loss])
        calls.append(list(heard))
    scope = static.global_scope()
    return {
        "weights": [
            np.array(scope.find_var(parameter.name).get_tensor()).tolist()
            for parameter in net.parameters()
        ],
        "ops": [[op.type for op in block.ops] for block in main.blocks],
        "calls": calls,
    }


for method in ("all_reduce", "reduce", "broadcast"):
    listen(method)
if is_static:
    paddle.enable_static()
    fleet.init(is_collective=True)
else:
    module: Any = paddle.optimizer.momentum
    counted = module._C_ops = Kernels(module._C_ops)
    paddle.distributed.init_parallel_env()
made = []
for numbers in trainings:
    paddle.seed(7)
    made.append((train_static if is_static else train_dynamic)(*numbers))
Path(f"made.{get_rank()}.json").write_text(json.dumps(made))
