"""The injected code in one training process, with each real Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, alone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# The methods that call fused kernels are counted; the evidence counts the calls themselves. A class
# of another name is not fused, so one process has both kinds.
SCRIPT = """
import os, subprocess, sys
import numpy as np, paddle
from paddle import nn
from paddle.optimizer import Adam, AdamW, Momentum, SGD

calls = {}
def count(kind, method):
    original = getattr(kind, method)
    def counted(self, *args, **options):
        key = type(self).__name__, method
        calls[key] = calls.get(key, 0) + 1
        return original(self, *args, **options)
    setattr(kind, method, counted)
for kind in (Momentum, Adam):
    count(kind, "_append_optimize_multi_tensor_op")
    count(kind, "_append_optimize_op")

class PlainMomentum(Momentum): pass
class PlainAdam(Adam): pass

class Rows(paddle.io.Dataset):
    def __getitem__(self, index):
        return np.random.RandomState(index).rand(6).astype("float32")
    def __len__(self):
        return 24

def train(kind, sparse=False, **options):
    paddle.seed(7)
    layers = nn.LayerList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)])
    layers.append(nn.Embedding(5, 6, sparse=sparse))
    rate = paddle.optimizer.lr.StepDecay(0.05, 2)
    optimizer = kind(learning_rate=rate, parameters=layers.parameters(), **options)
    for index, x in enumerate(paddle.io.DataLoader(Rows(), batch_size=4)):
        hidden = layers[0](x + layers[3](paddle.to_tensor([index % 5])))
        if index not in (2, 3):                 # the parameters with gradients change
            hidden = layers[1](hidden)
        (layers[2](hidden) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        rate.step()
        if index == 3:                          # a checkpoint is resumed
            state = {name: value.clone() if hasattr(value, "clone") else value
                     for name, value in optimizer.state_dict().items()}
            optimizer.set_state_dict(state)
    return np.concatenate([parameter.numpy().ravel() for parameter in layers.parameters()])

clip = nn.ClipGradByGlobalNorm(0.5)
for kind, plain, options in (
    (Momentum, PlainMomentum, dict(weight_decay=0.01)),
    (Momentum, PlainMomentum, dict(use_nesterov=True, grad_clip=clip)),
    (Adam, PlainAdam, dict(weight_decay=0.01, grad_clip=clip)),
):
    assert np.abs(train(kind, **options) - train(plain, **options)).max() <= 1e-6
fused = {name: number for (name, method), number in calls.items() if "multi" in method}
assert fused == {"Momentum": 12, "Adam": 6}, calls
# A sparse gradient is not for the fused kernel; the others of its kind are left alone, too.
assert np.abs(train(Momentum, sparse=True) - train(PlainMomentum, sparse=True)).max() <= 1e-6
assert calls["Momentum", "_append_optimize_multi_tensor_op"] == 12, calls
train(AdamW), train(SGD)

# Children of the rank: data loaders, one that imports Paddle only, and one that trains, too.
for _ in paddle.io.DataLoader(Rows(), batch_size=12, num_workers=2):
    pass
child = '''
import paddle
layer = paddle.nn.Linear(1, 1)
layer(paddle.ones([1, 1])).backward()
paddle.optimizer.SGD(0.1, parameters=layer.parameters()).step()
'''
subprocess.run([sys.executable, "-c", child], check=True)
print("PID", os.getpid(), sys.argv, __name__)
"""


@pytest.mark.parametrize("version", PYTHONS)
def test_optimizers_are_fused_where_it_changes_nothing_and_children_leave_the_proof_alone(
    version: str, tmp_path: Path
) -> None:
    asked = {"build_strategy": {"fuse_all_optimizer_ops": True}}
    proof, output = alone(version, tmp_path, SCRIPT, asked, "--flag")
    script = str(tmp_path / "train.py")
    assert f"PID {proof['pid']} [{script!r}, '--flag'] __main__" in output
    # 6 trainings with both kinds, 2 with sparse gradients, AdamW and SGD: 6 updates each.
    assert proof["updates"] == 60
    assert proof["fields"] == [
        {
            "name": "fuse_all_optimizer_ops",
            "asked": True,
            "in_effect": True,
            "status": "effective",
            "reason": "",
            "evidence": "7 parameters in 1 kernel call",
        }
    ]
    assert proof["notes"] == []
