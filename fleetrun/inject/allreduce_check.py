"""`fleetrun doctor --allreduce`: checks and times allreduces of several sizes.

Each rank gets the name of the file to which rank 0 writes the measurements as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Bytes of one allreduce, and its repetitions; reported times are per allreduce.
_SIZES = ((1 << 10, 50), (1 << 14, 50), (1 << 18, 20), (1 << 22, 10), (1 << 26, 3))


def measure(rank: int, ranks: int) -> dict[str, Any]:
    """Return what this rank measured: backend, ranks, rows.

    A row is bytes, seconds of one allreduce, and whether every sum was right.
    """
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    on_device = str(paddle.device.get_device()) != "cpu"
    rows = []
    for nbytes, times in _SIZES:
        numbers = paddle.arange(nbytes // 4, dtype="float32") % 97
        summed = numbers * (rank + 1)
        dist.all_reduce(summed)
        expected = numbers * (ranks * (ranks + 1) // 2)
        is_right = bool((summed == expected).all())
        sums = paddle.zeros_like(numbers)
        dist.barrier()
        if on_device:
            paddle.device.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(sums)
        if on_device:
            paddle.device.synchronize()
        rows.append((nbytes, (time.perf_counter() - began) / times, is_right))
    return {"backend": os.environ["PADDLE_DISTRI_BACKEND"], "ranks": ranks, "rows": rows}


def main(out: str) -> None:
    """Measure; rank 0 writes the file OUT."""
    rank, ranks = (int(os.environ[f"PADDLE_TRAINER{name}"]) for name in ("_ID", "S_NUM"))
    measured = measure(rank, ranks)
    if rank == 0:
        Path(out).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    # Python puts the folder of a script first on the path; our modules must not hide others there.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    main(sys.argv[1])
