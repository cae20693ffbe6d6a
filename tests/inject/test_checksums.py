"""Checksums of tensors as on a device, with each real Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, ROOT, alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import paddle
from fleetrun.inject import checksums

checksums._MOST_AT_ONCE, checksums._PERIOD = 5, 7
layer = paddle.nn.Linear(3, 4)
tensors = [layer.weight, layer.bias, layer.weight.T, paddle.ones([]), paddle.rand([17])]
tensors += [tensors[-1].astype("float64"), tensors[-1].astype("bfloat16"), paddle.arange(9)]
sums = [int(checksums._of_tensor(tensor, paddle)) for tensor in tensors]
assert len(set(sums)) == len(set(checksums.of_values(tensors))) == len(tensors), sums
assert sums == [int(checksums._of_tensor(tensor.clone(), paddle)) for tensor in tensors]
# What a plain sum of bits would not see: one grows in size by as much as the other shrinks.
for size in range(2, 40):
    signs = [1 - 2 * (bin(place).count("1") % 2) for place in range(size)]
    apart = [paddle.to_tensor(signs, dtype="float32") * 0.3 + drift for drift in (0.0, 1e-4)]
    before, after = (int(checksums._of_tensor(tensor, paddle)) for tensor in apart)
    assert before != after, size
# Only who trains leaves evidence.
layer(paddle.ones([1, 3])).sum().backward()
paddle.optimizer.SGD(0.1, parameters=layer.parameters()).step()
"""


@pytest.mark.parametrize("version", PYTHONS)
def test_tensors_of_other_bits_have_other_checksums(version: str, tmp_path: Path) -> None:
    alone(version, tmp_path, SCRIPT, {"strategy": {"fuse_all_reduce_ops": True}})
