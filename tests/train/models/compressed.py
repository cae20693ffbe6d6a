"""Trains with gradients that are sent in 16 bits; reports the dtypes that went out.

And the weights beside those of one process that sees the batches of all ranks.
"""

from __future__ import annotations

from typing import Any

import paddle
from counting import observe  # type: ignore[import-not-found, unused-ignore]
from paddle import nn
from twins import (  # type: ignore[import-not-found, unused-ignore]
    batches,
    rank,
    train,
    twins,
    write,
)

STEPS = 6
sent: list[str] = []


def note(_name: str, _group: Any, tensor: Any) -> None:
    sent.append(str(tensor.dtype).rpartition(".")[2].lower())


observe(note, "all_reduce")
paddle.distributed.init_parallel_env()


def new() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


net, alone = twins(new)
found = train(paddle.DataParallel(net), batches([rank], 5, 4), STEPS, before=sent.clear)
report = {"weights": found, "sent": [*sent]}
everyone = [*range(paddle.distributed.get_world_size())]
write({**report, "alone": train(alone, batches(everyone, 5, 4), STEPS)})
