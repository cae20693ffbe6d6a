"""Every way in which Paddle updates parameters in dynamic graphs is one update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, alone, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

SCRIPT = """
import numpy as np, paddle
net = paddle.nn.Linear(4, 4)
made, own = paddle.optimizer, net.parameters()
def lost():
    return (net(paddle.ones([2, 4])) ** 2).mean()
def backward():
    lost().backward()
def step(optimizer):
    backward()
    optimizer.step()
    optimizer.clear_grad()
def minimized():
    optimizer = made.SGD(0.01, parameters=own)
    loss = lost()
    loss.backward()
    optimizer.minimize(loss)
def applied():
    backward()
    grads = [(each, each._grad_ivar()) for each in own]
    made.SGD(0.01, parameters=own)._apply_optimize(None, None, grads)
def scaler_on_cpu():
    # Paddle wants a GPU for it; its kernels are there for the CPU.
    module = paddle.amp.grad_scaler
    place = type("Place", (), {"is_gpu_place": lambda _: True})()
    tracer = module._dygraph_tracer
    module._dygraph_tracer = lambda: type("Tracer", (), {"_expected_place": place})
    scaler = paddle.amp.GradScaler(init_loss_scaling=2.0)
    module._dygraph_tracer = tracer
    module.amp_global_state().amp_dtype = "float16"
    # Paddle prints it, in a way that this numpy does not know any more.
    scaler._scale = scaler._scale.reshape([])
    return scaler
def scaled(skips=False, by="step"):
    scaler = scaler_on_cpu()
    optimizer = made.SGD(0.01, parameters=own)
    loss = scaler.scale(lost())
    loss.backward()
    if skips:
        own[0].grad.set_value(np.full([4, 4], np.inf, "float32"))
    getattr(scaler, by)(*[optimizer, loss][:1 + (by == "minimize")])
    if by == "step":
        scaler.update()
    optimizer.clear_grad()
def fitted():
    model = paddle.Model(net)
    model.prepare(made.SGD(0.01, parameters=own), paddle.nn.MSELoss())
    model.train_batch([paddle.ones([2, 4])], [paddle.ones([2, 4])])
def closed():
    made.LBFGS(0.01, max_iter=1, parameters=own).step(again)
def again():
    for each in own:
        each.clear_gradient()
    loss = lost()
    loss.backward()
    return loss
groups = [{"params": own[:1]}, {"params": own[1:], "learning_rate": 0.1}]
WAYS
"""
# What is called, how many updates are counted, and how many are skipped.
WAYS = {
    "step": ("step(made.SGD(0.01, parameters=own))", 1, 0),
    "step of two groups": ("step(made.AdamW(0.01, parameters=groups))", 1, 0),
    "fused step": ("step(made.Adam(0.01, parameters=own, use_multi_tensor=True))", 1, 0),
    "minimize": ("minimized()", 1, 0),
    "_apply_optimize by itself": ("applied()", 1, 0),
    "LBFGS": ("closed()", 1, 0),
    "LookAhead": ("step(paddle.incubate.LookAhead(made.SGD(0.01, parameters=own)))", 1, 0),
    "GradScaler.step": ("scaled()", 1, 0),
    "GradScaler.minimize": ("scaled(by='minimize')", 1, 0),
    "GradScaler.step that skips": ("scaled(skips=True)", 0, 1),
    "GradScaler.minimize that skips": ("scaled(skips=True, by='minimize')", 0, 1),
    "paddle.Model": ("fitted()", 1, 0),
}


@pytest.mark.parametrize("version", PYTHONS)
def test_each_way_is_one_update(version: str, tmp_path: Path) -> None:
    watched = "\n".join(
        f"before = proof(); {call}; print({name!r}, *(now - then for now, then in"
        " zip(proof(), before)))"
        for name, (call, _, _) in WAYS.items()
    )
    proof = """
import sys
def proof():
    updates = sys.modules["_fleetrun_inject.updates"]
    return updates.count(), len(skipped)
skipped = []
sys.modules["_fleetrun_inject.updates"].on_skipped(lambda *_: skipped.append(1), "a test")
"""
    script = SCRIPT.replace("WAYS", proof + watched)
    _, said = alone(version, tmp_path, script, {"strategy": {"fuse_all_reduce_ops": True}})
    found = [line.rsplit(" ", 2) for line in said.splitlines() if line.rsplit(" ", 2)[0] in WAYS]
    counted = {name: (int(updates), int(skipped)) for name, updates, skipped in found}
    assert counted == {name: (updates, skipped) for name, (_, updates, skipped) in WAYS.items()}


@pytest.mark.parametrize("version", PYTHONS)
def test_updates_of_sharding_stage_1_are_seen(version: str, tmp_path: Path) -> None:
    reports = train(PYTHONS[version], "sharded.py", tmp_path / "sharded", {"nccl_comm_num": 1})
    assert reports == [{"updates": 6, "inner": "DygraphShardingOptimizer"}] * 2
