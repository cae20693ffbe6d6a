"""Trains models of many kinds with micro-batches, one after the other, and reports on each.

It knows nothing of a strategy: `--accumulate 4` is its own way to a larger batch, which it is also
given with a strategy that makes it of `--accumulate 1`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import paddle
import shapes  # type: ignore[import-not-found, unused-ignore]
import stepping  # type: ignore[import-not-found, unused-ignore]
from learning import options, rank, report  # type: ignore[import-not-found, unused-ignore]

paddle.distributed.init_parallel_env()
KINDS = {
    **{
        name: getattr(shapes, name)
        for name in (
            *("cnn", "transformer", "recomputed", "tied", "straight", "sparse", "frozen"),
            *("refrozen", "sometimes", "penalty", "compiled", "accumulated", "two"),
        )
    },
    **{
        name: getattr(stepping, name)
        for name in (
            *("groups", "several", "own", "wrapped", "scaled", "paired", "loaded", "clipped"),
            *("resumed", "fitted", "by_fleet"),
        )
    },
}
# What Paddle's own reducer cannot train, trains apart, or gets wrong.
MORE = {
    "reentrant": lambda: shapes.recomputed("reentrant", reentrant=True),
    "strided": lambda: shapes.straight("strided", transposes=True),
    "thawed": lambda: shapes.refrozen("thawed", begins_frozen=True),
}
chosen = options.kinds.split(",") if options.kinds else KINDS
for name in chosen:
    {**KINDS, **MORE}[name]()
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
