"""Trains models of many kinds with micro-batches, one after the other, and reports on each.

It does not mention a strategy: `--accumulate 4` is its own way to a larger batch, and a strategy
makes the same of `--accumulate 1`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import architectures  # noqa: F401  # its kinds
import learning
import loops  # noqa: F401  # its kinds
import paddle
import shapes
import stepping
from learning import options, rank, report

paddle.distributed.init_parallel_env()
KINDS = {
    **{
        name: getattr(shapes, name)
        for name in (
            *("cnn", "transformer", "recomputed", "tied", "straight", "sparse", "frozen"),
            *("refrozen", "sometimes", "penalty", "accumulated"),
        )
    },
    **{
        name: getattr(stepping, name)
        for name in (
            *("groups", "wrapped", "scaled", "paired", "normed", "resumed", "fitted", "by_fleet"),
        )
    },
}
# What Paddle's own reducer cannot train, trains apart, or gets wrong.
MORE = {
    "reentrant": lambda: shapes.recomputed("reentrant", reentrant=True),
    "strided": lambda: shapes.straight("strided", transposes=True),
    "thawed": lambda: shapes.refrozen("thawed", begins_frozen=True),
    # With small buckets the gradient of one weight is a bucket by itself.
    "in_turns": shapes.in_turns,
    # Kinds that one process can also train alone.
    **learning.KINDS,
}


# Paddle crashes where it adds a sparse gradient to another on a plug-in's device.
if paddle.device.get_device().partition(":")[0] not in ("cpu", "gpu", "xpu"):
    del KINDS["sparse"]


def train(name: str) -> None:
    """Train the kind NAME."""
    {**KINDS, **MORE}[name]()


for name in options.kinds.split(",") if options.kinds else KINDS:
    train(name)
if rank == 0:
    with learning.one_process():
        for name in filter(None, options.alone.split(",")):
            train(name)
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
