"""Trains models for which two-level sums are fast, or slow, by a clock that the script sets.

Reports by model the weights beside those of one process with the batches of all ranks, the first
stages of two levels, the sums among all ranks, and the communicators that were made and freed.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn
from paddle.base import core
from twins import batches, nranks, rank, train, twins, write

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 3
now = 0.0
# The seconds that a tensor takes each way; and the number of tensors.
takes = {"two": 0.0, "one": 0.0}
seen: Counter[str] = Counter()


def timed(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def begin(group: Any, tensor: Any, *args: Any) -> Any:
        global now  # noqa: PLW0603 - the script's clock
        is_whole = group.size() == nranks
        way = "two" if name == "reduce" else "one" if is_whole else "leaders"
        if tensor.dtype == paddle.float32:
            now += takes.get(way, 0.0)
            seen[way] += 1
        return plain(group, tensor, *args)

    return begin


for name in ("reduce", "all_reduce"):
    setattr(core.ProcessGroup, name, timed(name, getattr(core.ProcessGroup, name)))
levels: Any = sys.modules["_fleetrun_inject.dygraph.levels"]
levels.clock = lambda: now
paddle.distributed.init_parallel_env()
communicators: Any = sys.modules["_fleetrun_inject.communicators"]
new_group = communicators.new_group
made: list[Any] = []


def counted(ranks: Any) -> Any:
    group = new_group(ranks)
    made.extend([group] * (group is not None))
    return group


communicators.new_group = counted


freed: list[Any] = []
# On GPUs Paddle 3 can do this.
kind: Any = core.ProcessGroup
kind.shutdown = property(lambda group: partial(freed.append, group))


def net(width: int) -> Any:
    """Return two layers, WIDTH wide."""
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


report: dict[str, Any] = {}
models = []
# The second model has the sizes of the first, so nothing is measured again.
for name, width, two_s, one_s in (
    ("two", 6, 0.002, 0.01),
    ("known", 6, 0.01, 0.002),
    ("one", 8, 0.01, 0.002),
):
    takes.update(two=two_s, one=one_s)
    own, alone = twins(partial(net, width))
    models.append(paddle.DataParallel(own))
    seen.clear()
    report[name] = {"weights": train(models[-1], batches([rank], 5, 4), STEPS), "seen": dict(seen)}
    report[name] |= {"made": len(made), "freed": len(freed)}
    report[name]["alone"] = train(alone, batches(list(range(nranks)), 5, 4), STEPS)
write(report)
