"""Trains with gradients that are sent in 16 bits; reports the dtypes that were sent.

The weights are reported beside those of one process that sees the batches of all ranks.
"""

from __future__ import annotations

from typing import Any

import paddle
from counting import observe
from twins import batches, compare, mlp, train, write

STEPS = 6
sent: list[str] = []


def note(_name: str, _group: Any, tensor: Any) -> None:
    sent.append(str(tensor.dtype).rpartition(".")[2].lower())


observe(note, "all_reduce")
paddle.distributed.init_parallel_env()


def train_by(model: Any, ranks: list[int]) -> Any:
    def begin_again(_step: int) -> None:
        if isinstance(model, paddle.DataParallel):
            sent.clear()

    return train(model, batches(ranks, 5, 4), STEPS, begin_again)


write({**compare(lambda: mlp(4, 8, 3), train_by), "sent": sent})
