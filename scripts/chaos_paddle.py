"""Faults of `scripts/chaos --hosts N` on jobs whose ranks train with Paddle, over gloo.

The ranks sum up a flag over and over, and end when all of them may, so the loss of one is an error
in all others: none of these may be blamed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from chaos_hosts import FAULTS as SHELLS
from chaos_hosts import HostsJob

if TYPE_CHECKING:
    import random
    from pathlib import Path

    import lab  # pyright: ignore[reportMissingImports] - it is in tests
    from chaos_hosts import Fault

# Four ranks import Paddle on a machine that has much else to do.
_READY_S = 180.0

TRAIN = """
import os, sys
import paddle, paddle.distributed as dist

folder = sys.argv[1]
dist.init_parallel_env()
rank = dist.get_rank()
orders = os.open(f"{folder}/orders.{rank}", os.O_RDWR | os.O_NONBLOCK)
may_end, is_ready, ended = 0.0, False, 0
while ended < dist.get_world_size():
    try:
        code = int(os.read(orders, 100).split()[0])
    except BlockingIOError:
        code = None
    if code:
        sys.exit(code)
    may_end = 1.0 if code == 0 else may_end
    flag = paddle.to_tensor([may_end])
    dist.all_reduce(flag)
    ended = flag.item()
    if not is_ready:
        is_ready = True
        with open(f"{folder}/ready.{rank}", "a") as file:
            print(os.getpid(), file=file)
"""


class PaddleJob(HostsJob):
    """A job with one rank on each host, which trains."""

    script = f"""
    case " $2 " in *" $PADDLE_TRAINER_ID "*) trap "" TERM INT HUP ;; esac
    exec '{sys.executable}' "$1/train.py" "$1"
    """
    ready_within_s = _READY_S

    def __init__(
        self, network: lab.Network, folder: Path, fault: Fault, draw: random.Random
    ) -> None:
        super().__init__(network, folder, fault, draw)
        self.per_host = 1
        self.ranks = range(len(self.hosts))
        self.deaf = [rank for rank in self.deaf if rank in self.ranks]

    def start(self) -> None:
        """Start a launcher on each host, in any order."""
        (self.folder / "train.py").write_text(TRAIN)
        super().start()


FAULTS = tuple(shell._replace(name=f"paddle: {shell.name}", trains=True) for shell in SHELLS)
