"""Ways in which a rank keeps the others waiting, drawn from a seed: `hanging.py SEED`."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from typing import Any, NamedTuple

WAYS = ("skip", "swap", "leave", "end", "swallow", "sleep", "lock", "shape")
STEPS = 6


class Fault(NamedTuple):
    """RANK deviates in STEP, in one WAY."""

    way: str
    rank: int
    step: int
    ranks: int


def drawn(seed: int) -> Fault:
    """Return the fault of SEED: the ways in turn, all else at random."""
    draw = random.Random(seed)
    ranks = draw.choice((3, 4))
    return Fault(WAYS[seed % len(WAYS)], draw.randrange(ranks), draw.randrange(1, STEPS - 1), ranks)


def load_batch() -> None:
    time.sleep(600)


def acquire() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def bad_batch() -> None:
    raise ValueError("bad batch")


BEFORE = {"swallow": bad_batch, "sleep": load_batch, "lock": acquire}


def train(fault: Fault) -> None:
    import paddle
    from paddle import distributed as dist

    paddle.device.set_device(os.environ.get("TESTDEVICE_KIND", "cpu"))
    dist.init_parallel_env()
    rank = dist.get_rank()
    pair: Any = dist.new_group([0, 1])
    value = paddle.ones([4, 2])

    def step(number: int) -> None:
        way = fault.way if (rank, number) == (fault.rank, fault.step) else ""
        BEFORE.get(way, int)()
        if way == "swap":
            dist.broadcast(value, 0)
        if way != "skip":
            dist.all_reduce(paddle.ones([5]) if way == "shape" else value)
        if rank < 2 and way != "swap":
            dist.all_reduce(value, group=pair)
        if way != "swap":
            dist.broadcast(value, 0)

    for number in range(STEPS):
        if (rank, number) == (fault.rank, fault.step) and fault.way in {"leave", "end"}:
            break
        try:
            step(number)
        except ValueError as error:
            print("skipped:", error)
    if (rank, fault.way) == (fault.rank, "end"):
        return
    dist.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOG_v", "0")
    train(drawn(int(sys.argv[1])))
