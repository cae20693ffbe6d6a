"""A rank that trains a model for as many steps as it is told to, and says how long they took."""

from __future__ import annotations

import os
import sys
import time

MODEL, STEPS, WARM_UP = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
IS_STATIC = MODEL.endswith("-static")
if IS_STATIC:
    # Paddle 3 reads it while it is imported.
    os.environ["FLAGS_enable_pir_api"] = "0"

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS, WIDTH = 150, 32


def deep() -> tuple[nn.Layer, list[int]]:
    """300 gradients of 4 KB and less, and next to nothing to compute."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), [4, WIDTH]


def resnet() -> tuple[nn.Layer, list[int]]:
    """45 MB of gradients, on images that are small enough for a CPU."""
    return paddle.vision.models.resnet18(num_classes=10), [4, 3, 32, 32]


def large() -> tuple[nn.Layer, list[int]]:
    """One gradient of 16 MB."""
    return nn.Linear(1024, 4096, bias_attr=False), [16, 1024]


def tiny() -> tuple[nn.Layer, list[int]]:
    """1 KB of gradients."""
    return nn.Linear(16, 15), [4, 16]


def wide() -> tuple[nn.Layer, list[int]]:
    """100 MB of gradients, in ten layers."""
    return nn.Sequential(*(nn.Linear(1600, 1600) for _ in range(10))), [16, 1600]


MODELS = {"tiny": tiny, "many": deep, "resnet": resnet, "large": large, "wide": wide}


def dynamic() -> Callable[[], None]:
    """Return what makes a step."""
    paddle.distributed.init_parallel_env()
    paddle.seed(5)
    net, shape = MODELS[MODEL.partition("-")[0]]()
    model = paddle.DataParallel(net)
    updating = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
    batch = paddle.randn(shape)

    def step() -> None:
        (model(batch) ** 2).mean().backward()
        updating.step()
        updating.clear_grad()

    return step


def static() -> Callable[[], None]:
    """Return what makes a step of a static graph."""
    fleet: Any = paddle.distributed.fleet
    paddle.enable_static()
    fleet.init(is_collective=True)
    paddle.seed(5)
    net, shape = MODELS[MODEL.partition("-")[0]]()
    loss = paddle.mean(net(paddle.static.data("batch", shape)))
    fleet.distributed_optimizer(paddle.optimizer.SGD(1e-3)).minimize(loss)
    executor = paddle.static.Executor()
    executor.run(paddle.static.default_startup_program())
    program: Any = paddle.static.default_main_program()
    import numpy as np

    batch = np.random.RandomState(5).randn(*shape).astype("float32")

    def step() -> None:
        executor.run(program, feed={"batch": batch}, fetch_list=[])

    return step


def hooked() -> Iterator[tuple[type, str, Any]]:
    """Find the methods that fleetrun has put itself before, and what they were."""
    executor: Any = paddle.static.Executor
    cache: Any = sys.modules["paddle.base.executor"]._ExecutorCache  # noqa: SLF001
    kinds: list[type] = [*paddle.optimizer.SGD.__mro__, paddle.DataParallel, executor, cache]
    for kind in kinds:
        for name, method in list(vars(kind).items()):
            plain = method
            while os.sep + "inject" + os.sep in _file(plain):
                plain = plain.__wrapped__
            if plain is not method:
                yield kind, name, plain


def _file(function: Any) -> str:
    return str(getattr(getattr(function, "__code__", None), "co_filename", ""))


@contextmanager
def unhooked() -> Iterator[None]:
    """Leave out what fleetrun does at each step."""
    hooks = list(hooked())
    if not hooks:
        raise LookupError("there are no hooks to leave out")
    kept = [(kind, name, vars(kind)[name]) for kind, name, _ in hooks]
    for kind, name, plain in hooks:
        setattr(kind, name, plain)
    try:
        yield
    finally:
        for kind, name, method in kept:
            setattr(kind, name, method)


def wait_for_device() -> None:
    if paddle.is_compiled_with_cuda() and paddle.device.get_device().startswith("gpu"):
        paddle.device.cuda.synchronize()


step = static() if IS_STATIC else dynamic()
for _ in range(WARM_UP):
    step()
rank = os.environ["PADDLE_TRAINER_ID"]
reports = os.open(os.environ["BENCH_SAID"], os.O_WRONLY)
pipe = f"{os.environ['BENCH_FOLDER']}/turns.{rank}"
os.mkfifo(pipe)
wait_for_device()
os.write(reports, f"ready {os.getpid()}\n".encode())
turns = os.open(pipe, os.O_RDONLY)


def train() -> None:
    """Make the steps of a turn, and say how long they took."""
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait_for_device()
    os.write(reports, f"took {time.perf_counter() - started}\n".encode())


# Each byte is a turn; the end of the pipe is the end of the training.
while turn := os.read(turns, 1):
    if turn == b"-":
        with unhooked():
            train()
    else:
        train()
