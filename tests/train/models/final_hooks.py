"""Trains with hooks at the end of backward that replace the gradients, as master gradients do.

Reports the weights beside those of one process, which sees the batches of all ranks. Paddle adds
such a hook for mixed precision on GPUs only; this is what it does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base import core
from paddle.distributed.fleet.utils import recompute
from twins import rank, write

MICRO, ROUNDS = 2, 3
eager: Any = core.eager
merges = "gradient_merge" in Path(os.environ["FLEETRUN_STRATEGY_FILE"]).read_text()
paddle.distributed.init_parallel_env()


class Plain(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class Recomputed(Plain):
    """The same layers with a nested backward."""

    def forward(self, x: Any) -> Any:
        x.stop_gradient = False
        return self.second(recompute(self.first, x, use_reentrant=True))


class Halves(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Parameters of 16 bits, in operations that CPUs support."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (self.create_parameter([6]) for _ in range(2))
        self.to(dtype="bfloat16")

    def forward(self, x: Any) -> Any:
        out: Any = x * self.first.astype("float32") + x * x * self.second.astype("float32")
        return out


def replaced(parameters: list[Any]) -> None:
    """Replace gradients by copies; 16-bit ones by 32-bit copies."""
    if parameters[0].dtype == paddle.bfloat16:
        eager.set_master_grads(parameters)
        return
    for parameter in parameters:
        parameter.grad = parameter.grad.detach() * 1.0


def batches(ranks: list[int]) -> Any:
    """Yield the rows of RANKS: multiples of 1/4, exact in 16 bits."""
    generators = [np.random.RandomState(rank) for rank in ranks]
    for _ in range(MICRO * ROUNDS):
        rows = [generator.randint(-4, 5, (4, 6)).astype("float32") / 4 for generator in generators]
        yield paddle.to_tensor(np.concatenate(rows))


def train(model: Any, ranks: list[int]) -> dict[str, Any]:
    """Train MODEL on the batches of RANKS; a single process merges and updates by itself."""
    parameters = model.parameters()
    is_half, is_alone = parameters[0].dtype == paddle.bfloat16, len(ranks) > 1
    optimizer = None if is_alone else paddle.optimizer.SGD(0.125, parameters=parameters)
    own_steps = MICRO if merges and is_alone else 1
    dtypes = set()
    # No optimizer has a CPU kernel for 16 bits.
    by_hand = [parameter.astype("float32").numpy() for parameter in parameters]
    for number, batch in enumerate(batches(ranks), 1):
        eager._add_backward_final_hook(lambda: replaced(parameters))
        out = model(batch)
        # A loss whose gradients are exact in 16 bits.
        loss = out.sum() / len(batch) if is_half else (out**2).mean()
        (loss / own_steps).backward()
        dtypes |= {str(parameter.grad.dtype).rpartition(".")[2] for parameter in parameters}
        if number % own_steps:
            continue
        if optimizer is not None and not is_half:
            optimizer.step()
            optimizer.clear_grad()
            continue
        for place, parameter in enumerate(parameters):
            by_hand[place] = by_hand[place] - 0.125 * parameter.grad.numpy()
            if not is_half:
                parameter.set_value(by_hand[place])
            parameter.clear_gradient(set_to_zero=False)
    arrays = by_hand if is_half else [parameter.numpy() for parameter in parameters]
    weights = [float(value) for array in arrays for value in array.ravel()]
    return {"weights": weights, "dtypes": sorted(name.lower() for name in dtypes)}


report: dict[str, Any] = {}
for kind in (Plain, Recomputed) if merges else (Plain, Recomputed, Halves):
    paddle.seed(5)
    net, alone = kind(), kind()
    alone.set_state_dict(net.state_dict())
    report[kind.__name__] = {
        **train(paddle.DataParallel(net), [rank]),
        "alone": train(alone, [0, 1])["weights"],
    }
write(report)
