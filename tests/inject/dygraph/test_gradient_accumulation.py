"""Gradient merge in one process: optimizers of all sorts, with each real Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

SCRIPT = """
import numpy as np, paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.optimizer import SGD

def batch(layer):
    (layer(paddle.ones([1, 2])) ** 2).mean().backward()

def values(layer):
    return layer.weight.numpy().copy()

# The script says after its optimizer how many micro-steps it wants: two, and not four.
layer = nn.Linear(2, 2)
early = SGD(0.1, parameters=layer.parameters())
fleet.init(is_collective=True)
strategy = fleet.DistributedStrategy()
strategy.gradient_merge_configs = {"k_steps": 2}
optimizer = fleet.distributed_optimizer(early, strategy)
for index in range(4):
    before = values(layer)
    batch(layer)
    optimizer.step()
    optimizer.clear_grad()
    assert np.array_equal(before, values(layer)) is (index % 2 == 0), index

# Another optimizer of the same parameters, whose step is its own, and which counts them.
class Signs(SGD):
    steps = 0
    def step(self):
        Signs.steps += 1
        with paddle.no_grad():
            for parameter in self._parameter_list:
                parameter.set_value(parameter - 0.5 * parameter.grad)

optimizer = Signs(0.1, parameters=layer.parameters())
for index in range(2):
    weight = values(layer)
    batch(layer)
    single = layer.weight.grad.numpy().copy()
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
    optimizer.step()
    if index == 0:
        assert Signs.steps == 0 and float(norm) == 0.0
        optimizer.clear_grad()
# The script has seen the mean of two equal gradients, as none was discarded in between.
assert Signs.steps == 1 and float(norm) > 0
assert np.abs(values(layer) - (weight - 0.5 * single)).max() <= 1e-6
optimizer.clear_grad()

# What averages the parameters may clear their gradients, too.
average = paddle.incubate.ModelAverage(
    1.0, parameters=layer.parameters(), min_average_window=1, max_average_window=9
)
optimizer = SGD(0.1, parameters=layer.parameters())
batch(layer)
optimizer.step()
average.step()
average.clear_grad()

for kind in {paddle.optimizer.LBFGS, paddle.incubate.optimizer.LBFGS}:
    try:
        kind(0.1, parameters=layer.parameters()).step(lambda: None)
    except RuntimeError as error:
        assert "LBFGS runs several backwards" in str(error)
    else:
        raise AssertionError(kind)
"""

BY_HAND = """
import sys, paddle
way, = sys.argv[1:]
layer = paddle.nn.Linear(2, 1)
layer.weight.set_value(paddle.ones([2, 1]))
optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
held = lambda parameter: paddle.base.core.eager.get_all_grads([parameter])[0]
try:
    for _ in range(8):
        layer(paddle.ones([1, 2])).sum().backward()
        with paddle.no_grad():
            for parameter in layer.parameters():
                if way == "scale":
                    parameter.grad.scale_(0.5)
                elif way == "replace":
                    parameter.grad = parameter.grad * 0.5
                elif way == "held":
                    held(parameter).scale_(0.5)
        optimizer.step()
        with paddle.no_grad():
            for parameter in layer.parameters():
                if way == "zero":
                    parameter.grad.zero_()
                elif way == "zero_held":
                    held(parameter).zero_()
                else:
                    parameter.clear_gradient()
except RuntimeError as error:
    print(error)
print("weight", layer.weight.numpy().ravel()[0])
"""


# Some batches are bad: their gradients are read and cleared. The next ones are changed.
SKIPPING = """
import sys, paddle
way, = sys.argv[1:]
layer = paddle.nn.Linear(2, 2)
layer.weight.set_value(paddle.ones([2, 2]))
layer.bias.set_value(paddle.zeros([2]))
optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
factors = paddle.to_tensor([1.0, 2.0])
def batch(size):
    (layer(paddle.ones([1, 2])) * factors * size).sum().backward()
    return float(layer.weight.grad.abs().max())
try:
    for step in range(8):
        # The first of one update, and the last of another.
        if step in (0, 7) or way == "each":
            size = batch(100)
            optimizer.clear_grad()
        batch(1)
        with paddle.no_grad():
            for parameter in layer.parameters():
                if way in ("scale", "each"):
                    parameter.grad.scale_(0.5)
                elif way == "replace":
                    parameter.grad = parameter.grad * 0.5
                elif way == "clamp":
                    parameter.grad.clip_(-1, 1)
                elif way == "add" and step == 7:
                    parameter.grad.add_(paddle.ones_like(parameter.grad))
        if way == "clip":
            paddle.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
        optimizer.step()
        optimizer.clear_grad()
except RuntimeError as error:
    print(error)
print("weight", layer.weight.numpy()[0].tolist())
"""

CLIPPING = """
import sys, paddle
begin, = map(float, sys.argv[1:])
layer = paddle.nn.Linear(2, 1, bias_attr=False)
layer.weight.set_value(paddle.full([2, 1], begin))
optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
try:
    for step in range(8):
        layer(-paddle.ones([1, 2])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        layer.weight.set_value(layer.weight.clip(-0.5, 0.5))
except RuntimeError as error:
    print(error)
print("weight", layer.weight.numpy().ravel()[0])
"""


@pytest.mark.parametrize("way", ["clip", "scale", "replace", "clamp", "add", "each"])
@pytest.mark.parametrize("version", PYTHONS)
def test_a_bad_batch_may_be_read_and_cleared_before_paddle_clips_gradients(
    version: str, way: str, tmp_path: Path
) -> None:
    asked = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}
    proof, output = alone(version, tmp_path, SKIPPING, {"strategy": asked}, way)
    # What the script does itself may use what it has read of the other batch.
    assert ("as if it composed them from several backwards" in output) is (way != "clip")
    assert proof["updates"] == (2 if way == "clip" else way == "add")


TWO_OPTIMIZERS = """
import sys, paddle
every, = map(int, sys.argv[1:])
layer = paddle.nn.Linear(2, 1, bias_attr=False)
layer.weight.set_value(paddle.ones([2, 1]))
both = [paddle.optimizer.SGD(rate, parameters=layer.parameters()) for rate in (0.1, 0.01)]
try:
    for step in range(8):
        # Micro-steps differ: none may be lost.
        (layer(paddle.ones([1, 2])).sum() * (1 + step % 2)).backward()
        optimizer = both[step // every % 2]
        optimizer.step()
        optimizer.clear_grad()
except RuntimeError as error:
    print(error)
print("weight", layer.weight.numpy().ravel()[0])
"""


@pytest.mark.parametrize("version", PYTHONS)
def test_optimizers_of_the_same_weights_may_take_turns_by_updates(
    version: str, tmp_path: Path
) -> None:
    asked = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    _, output = alone(version, tmp_path, TWO_OPTIMIZERS, {"strategy": asked}, "4")
    assert float(output.split("weight ")[1]) == pytest.approx(1 - 2 * 0.15 - 2 * 0.015)
    _, output = alone(version, tmp_path, TWO_OPTIMIZERS, {"strategy": asked}, "3")
    assert "two optimizers update the same parameters in turn" in output


@pytest.mark.parametrize("version", PYTHONS)
def test_weights_may_be_clipped_from_the_beginning_only(version: str, tmp_path: Path) -> None:
    asked = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}
    _, output = alone(version, tmp_path, CLIPPING, {"strategy": asked}, "0.45")
    assert float(output.split("weight ")[1]) == pytest.approx(0.5)
    _, output = alone(version, tmp_path, CLIPPING, {"strategy": asked}, "0.6")
    assert "clip the weights once before the first step, too" in output


@pytest.mark.parametrize(
    ("way", "weight"),
    [("scale", 0.9), ("replace", 0.9), ("zero", 0.8), ("held", 0.9), ("zero_held", 0.8)],
)
@pytest.mark.parametrize("version", PYTHONS)
def test_what_a_script_does_to_gradients_counts_once_in_each_update(
    version: str, way: str, weight: float, tmp_path: Path
) -> None:
    asked = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}
    told, output = alone(version, tmp_path, BY_HAND, {"strategy": asked}, way)
    # Two updates with gradients of 1.
    assert float(output.split("weight ")[1]) == pytest.approx(weight)
    assert told["updates"] == 2


@pytest.mark.parametrize("version", PYTHONS)
def test_every_optimizer_of_a_script_is_merged(version: str, tmp_path: Path) -> None:
    asked = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}
    told, _ = alone(version, tmp_path, SCRIPT, {"strategy": asked})
    # Two updates of the first optimizer, one of the second; a ModelAverage makes none.
    assert told["updates"] == 3
    assert told["counts"]["merged_steps"] == 2
    status = {field["name"]: (field["status"], field["in_effect"]) for field in told["fields"]}
    assert status == {
        "gradient_merge": ("effective", True),
        "gradient_merge_configs": ("script", {"k_steps": 2}),
    }
    assert "1 micro-step of a partial round was dropped" in told["notes"]
