"""Updates of dynamic graphs that stay unfused, and the reported reasons."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from training import alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# Optimizers, as Python, and what keeps their updates apart.
NOT_FUSED = {
    "Momentum(0.1, parameters=[{'params': net.parameters()}])": (
        "its parameters are in groups, which Paddle's fused kernels mix up"
    ),
    "Adam(0.1, parameters=net.parameters(), amsgrad=True)": (
        "Paddle's fused kernel does not support AMSGrad"
    ),
    "Momentum(0.1, parameters=[net.weight, net.bias, net.weight])": (
        "its list has a parameter twice, which one kernel would update at once"
    ),
    "Adam(0.1, parameters=[unused])": "there is nothing to update",
    "Momentum(0.1, parameters=net.to(dtype='float64').parameters())": (
        "linear_0.w_0 is float64, and only float32 is fused"
    ),
    "SGD(0.1, parameters=net.parameters())": "Paddle has no fused kernel for SGD",
}
UPDATES = """
import json, sys
import paddle
net = paddle.nn.Linear(4, 2)
unused = paddle.create_parameter([3], "float32", name="unused")
fields = sys.modules["_fleetrun_inject.settings"]._proof._fields
for made in sys.argv[1:]:
    optimizer = eval(made, vars(paddle.optimizer) | {"net": net, "unused": unused})
    net(paddle.ones([1, 4], net.weight.dtype)).sum().backward()
    optimizer.step()
    net.clear_gradients()
    print("FIELD", json.dumps(fields["fuse_all_optimizer_ops"]))
"""


def test_updates_that_paddle_would_fuse_wrongly_are_left_and_told(tmp_path: Path) -> None:
    asked = {"build_strategy": {"fuse_all_optimizer_ops": True}, "strategy": {}}
    proof, output = alone("3.3.1", tmp_path, UPDATES, asked, *NOT_FUSED)
    rows = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("FIELD ")]
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("no_effect", why) for why in NOT_FUSED.values()
    ]
    assert proof["fields"] == rows[-1:]
