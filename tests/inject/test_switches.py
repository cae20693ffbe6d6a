"""A switch and its details: one that is off is never reported as in effect, whoever set it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from training import alone, in_turns

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

SCRIPT = """
import os
os.environ["FLAGS_enable_pir_api"] = "0"
import numpy as np, paddle
from paddle.distributed import fleet
paddle.enable_static()
strategy = fleet.DistributedStrategy()
OWN
fleet.init(is_collective=True, strategy=strategy)
x = paddle.static.data("x", [None, 4])
loss = paddle.mean(paddle.nn.Linear(4, 1)(x))
fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1), strategy).minimize(loss)
executor = paddle.static.Executor()
executor.run(paddle.static.default_startup_program())
for _ in range(8):
    executor.run(feed={"x": np.ones([2, 4], "float32")}, fetch_list=[loss])
"""
DYNAMIC = """
import paddle
from paddle.distributed import fleet
strategy = fleet.DistributedStrategy()
OWN
fleet.init(is_collective=True, strategy=strategy)
net = paddle.nn.Linear(2, 2)
optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
optimizer = fleet.distributed_optimizer(optimizer, strategy)
for _ in range(8):
    net(paddle.ones([1, 2])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
"""
ON, OFF = "strategy.gradient_merge = True", "strategy.gradient_merge = False"
SWITCH, DETAILS = "gradient_merge", "gradient_merge_configs"
FOUR = {DETAILS: {"k_steps": 4}}


def told(
    version: str, folder: Path, script: str, own: str, strategy: dict[str, Any], **more: str
) -> tuple[int, dict[str, tuple[str, Any]]]:
    """Return the number of counted updates, and the status of each field."""
    proof, _ = alone(version, folder, script.replace("OWN", own), {"strategy": strategy, **more})
    statuses = {field["name"]: (field["status"], field["in_effect"]) for field in proof["fields"]}
    return proof["updates"], statuses


NOT = ("no_effect", None)
# The script's settings, the strategy, and the result: updates, the switch, its details.
STATIC: dict[str, tuple[str, dict[str, Any], int, dict[str, tuple[str, Any]]]] = {
    "off": ("", {SWITCH: False, **FOUR}, 8, {SWITCH: ("no_difference", False), DETAILS: NOT}),
    "by the script": (ON, FOUR, 2, {DETAILS: ("effective", {"k_steps": 4})}),
    "against the script": (
        OFF,
        {SWITCH: True, **FOUR},
        8,
        {SWITCH: ("script", False), DETAILS: NOT},
    ),
    "the script against it": (
        ON,
        {SWITCH: False, **FOUR},
        2,
        {SWITCH: ("script", True), DETAILS: ("effective", {"k_steps": 4})},
    ),
    # Every switch is reported by itself; a switch that was not mentioned is off.
    "others": (
        "",
        {"amp": False, "amp_configs": {"incr_ratio": 3.0}, "lars_configs": {"lars_coeff": 0.002}},
        8,
        {"amp": ("no_difference", False), "amp_configs": NOT, "lars_configs": NOT},
    ),
}


@pytest.mark.parametrize(("version", "case"), in_turns(*STATIC))
def test_details_are_in_effect_where_their_switch_is(
    version: str, case: str, tmp_path: Path
) -> None:
    own, asked, updates, expected = STATIC[case]
    assert told(version, tmp_path, SCRIPT, own, asked) == (updates, expected)


@pytest.mark.parametrize(("version", "own"), in_turns(ON, ""))
def test_dynamic_graphs_do_not_follow_a_switch_of_the_scripts(
    version: str, own: str, tmp_path: Path
) -> None:
    asked = {SWITCH: False, **FOUR}
    statuses = told(version, tmp_path, DYNAMIC, own, asked, mode="override" if own else "defaults")
    assert statuses == (8, {SWITCH: ("no_difference", False), DETAILS: NOT})
