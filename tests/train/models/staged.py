"""Trains with hierarchical allreduces, and lets stages go on only once others have begun.

The second stage of the first bucket waits until the last bucket is in its first stage. Backward
holds its last layer until the second stage of the first bucket has begun. A wait in vain is
reported. The weights are reported beside those of one process with the batches of all ranks.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import paddle
from counting import observe
from paddle import nn
from twins import batches, nranks, rank, train, twins, write

STEPS, WAITED_S = 4, 60.0
# Gradients of the buckets that are sent first and last: each layer is a bucket.
SENT_FIRST, SENT_LAST = 8 * 2 + 2, 4 * 6 + 6
asked = json.loads(Path(os.environ["FLEETRUN_STRATEGY_FILE"]).read_text())["strategy"]
size = asked["hierarchical_allreduce_inter_nranks"]
# A rank that is alone in its group has one stage only.
is_alone = rank % size == 0 and rank == nranks - 1
# The gradients of each stage, in order.
stages: dict[str, list[int]] = {"reduce": [], "all_reduce": [], "broadcast": []}
waited: list[bool] = []
second_begins, last_begins = threading.Event(), threading.Event()


def begin(name: str, _group: Any, tensor: Any) -> None:
    """Let a stage begin, or wait until others have."""
    if tensor.dtype != paddle.float32:
        return
    stages[name].append(tensor.size)
    if name == "reduce" and tensor.size == SENT_LAST:
        last_begins.set()
    is_second = name != "reduce" and not is_alone and not second_begins.is_set()
    if is_second and tensor.size == SENT_FIRST:
        second_begins.set()
        waited.append(last_begins.wait(WAITED_S))


observe(begin, *stages)
paddle.distributed.init_parallel_env()


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Three layers, the first of which waits in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        if self.waits:
            x.register_hook(self._wait)
        return self.last(self.middle(x))

    waits = False

    def _wait(self, gradient: Any) -> Any:
        if not is_alone:
            waited.append(second_begins.wait(WAITED_S))
        return gradient


net, alone = twins(Net)
model = paddle.DataParallel(net)
for sizes in stages.values():
    sizes.clear()


def begin_again(step: int) -> None:
    # The first backward sends nothing before its end.
    net.waits = step > 1
    second_begins.clear()
    last_begins.clear()


weights = train(model, batches([rank], 5, 4), STEPS, before=begin_again)
report = {"weights": weights, "waited": [*waited]}
report["stages"] = {name: [*sizes] for name, sizes in stages.items()}
write({**report, "alone": train(alone, batches([*range(nranks)], 5, 4), STEPS)})
