"""Makes one update on two ranks; rank 0 ends, then rank 1 runs the backward of another model."""

import fcntl
import os
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from twins import rank, twins, write


class Net(nn.Layer):  # type: ignore[misc, unused-ignore]
    """Two products, of which one has a strided gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 37)
        self.turned = self.create_parameter([9, 37])

    def forward(self, x: Any) -> Any:
        """Return nine numbers for each row of X."""
        return paddle.tanh(self.first(x)) @ self.turned.T


# The kernel releases this lock when rank 0 has ended.
lock = Path(f"{os.environ['OUTPUT']}.lock").open("w")  # noqa: SIM115
if rank == 0:
    fcntl.flock(lock, fcntl.LOCK_EX)
paddle.distributed.init_parallel_env()
net, alone = twins(Net)
model: Any = paddle.DataParallel(net)
optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
batch = paddle.ones([3, 5])
(model(batch) ** 2).mean().backward()
optimizer.step()
optimizer.clear_grad()
if rank == 1:
    fcntl.flock(lock, fcntl.LOCK_EX)
    (alone(batch) ** 2).mean().backward()
write(alone.first.weight.grad is not None)
