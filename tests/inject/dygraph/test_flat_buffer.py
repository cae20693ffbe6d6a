"""The flat tensor of a bucket, with each real Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, ROOT, alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# Merged gradients of mixed precision: one of 32 bits, a new one of 16, and none.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import paddle
from fleetrun.inject.dygraph.flat_buffer import FlatBuffer

halves = [paddle.nn.Linear(size, 1).to(dtype="bfloat16").weight for size in (3, 2, 4)]
halves[0]._set_grad_ivar(paddle.full([3, 1], 1 / 3))
halves[1]._set_grad_ivar(paddle.full([2, 1], 2.0).astype("bfloat16"))
flat, absent = FlatBuffer(halves).gather()
assert flat.dtype == paddle.float32
with paddle.no_grad():
    flat.scale_(3.0)
assert halves[0].grad.numpy().ravel().tolist() == [1.0] * 3
assert halves[1].grad.dtype == paddle.float32
assert halves[1].grad.numpy().ravel().tolist() == [6.0] * 2
((parameter, gradient),) = absent
assert parameter is halves[2] and gradient.dtype == paddle.float32
# Only who trains leaves evidence.
layer = paddle.nn.Linear(1, 1)
layer(paddle.ones([1, 1])).backward()
paddle.optimizer.SGD(0.1, parameters=layer.parameters()).step()
"""


@pytest.mark.parametrize("version", PYTHONS)
def test_gradients_of_16_and_32_bits_are_reduced_in_32(version: str, tmp_path: Path) -> None:
    alone(version, tmp_path, SCRIPT, {"strategy": {"fuse_all_reduce_ops": True}})
