"""Each way to update parameters in dynamic graphs counts as one update."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, SITE, alone, run, told

from fleetrun.rundir import rankfile

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
    grads = [(parameter, parameter._grad_ivar()) for parameter in own]
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
    if by == "step":
        scaler.step(optimizer=optimizer)
        scaler.update()
    else:
        scaler.minimize(optimizer, loss)
    optimizer.clear_grad()
def fitted():
    model = paddle.Model(net)
    model.prepare(made.SGD(0.01, parameters=own), paddle.nn.MSELoss())
    model.train_batch([paddle.ones([2, 4])], [paddle.ones([2, 4])])
def closed():
    made.LBFGS(0.01, max_iter=4, parameters=own).step(again)
def again():
    for parameter in own:
        parameter.clear_gradient()
    loss = lost()
    loss.backward()
    return loss
def fit():
    model = paddle.Model(net)
    model.prepare(made.SGD(0.01, parameters=own), paddle.nn.MSELoss())
    model.fit([(paddle.ones([2, 4]), paddle.ones([2, 4]))] * 3, epochs=1, verbose=0)
def mixed():
    from paddle.distributed.fleet.utils import mix_precision_utils
    part = paddle.nn.Linear(4, 4)
    model = mix_precision_utils.MixPrecisionLayer(part, dtype="bfloat16")
    inner = made.AdamW(0.01, parameters=part.parameters())
    (model(paddle.ones([2, 4])) ** 2).mean().backward()
    mix_precision_utils.MixPrecisionOptimizer(inner).step()
def heter():
    from paddle.distributed.fleet.meta_optimizers import dygraph_optimizer
    step(dygraph_optimizer.HeterParallelOptimizer(made.SGD(0.01, parameters=own), None))
def hybrid_scaler():
    from paddle.distributed.fleet.meta_optimizers import dygraph_optimizer
    topology = type("Topology", (), {"get_parallel_mode": lambda _: 0})()
    scaler = dygraph_optimizer.HybridParallelGradScaler(scaler_on_cpu(), topology)
    optimizer = made.SGD(0.01, parameters=own)
    loss = scaler.scale(lost())
    loss.backward()
    own[0].grad.set_value(np.full([4, 4], np.inf, "float32"))
    scaler.minimize(optimizer, loss)
    optimizer.clear_grad()
def pruned():
    from paddle.incubate import asp
    step(asp.decorate(made.SGD(0.01, parameters=own)))
groups = [{"params": own[:1]}, {"params": own[1:], "learning_rate": 0.1}]
WAYS
"""
# The call, the number of counted updates and of skipped ones, and the hooked function of Paddle at
# whose end they are counted. Ways that take several ranks are in test_hybrid_layouts.py.
WAYS = {
    "step": ("step(made.SGD(0.01, parameters=own))", 1, 0, "Optimizer.step"),
    "step of two groups": ("step(made.AdamW(0.01, parameters=groups))", 1, 0, "AdamW.step"),
    "fused step": (
        "step(made.Adam(0.01, parameters=own, use_multi_tensor=True))",
        *(1, 0, "Adam.step"),
    ),
    "minimize": ("minimized()", 1, 0, "Optimizer.minimize"),
    "_apply_optimize by itself": ("applied()", 1, 0, "Optimizer._apply_optimize"),
    "LBFGS": ("closed()", 1, 0, "LBFGS.step"),
    "LookAhead": (
        "step(paddle.incubate.LookAhead(made.SGD(0.01, parameters=own)))",
        *(1, 0, "LookAhead.step"),
    ),
    "GradScaler.step": ("scaled()", 1, 0, "GradScaler.step"),
    "GradScaler.minimize": ("scaled(by='minimize')", 1, 0, "GradScaler.minimize"),
    "GradScaler.step that skips": ("scaled(skips=True)", 0, 1, "GradScaler.step"),
    "GradScaler.minimize that skips": (
        "scaled(skips=True, by='minimize')",
        *(0, 1, "GradScaler.minimize"),
    ),
    "HybridParallelGradScaler that skips": (
        "hybrid_scaler()",
        *(0, 1, "HybridParallelGradScaler.minimize"),
    ),
    "paddle.Model": ("fitted()", 1, 0, "Optimizer.minimize"),
    "paddle.Model.fit": ("fit()", 3, 0, "Optimizer.minimize"),
    "MixPrecisionOptimizer": ("mixed()", 1, 0, "MixPrecisionOptimizer.step"),
    "HeterParallelOptimizer": ("heter()", 1, 0, "HeterParallelOptimizer.step"),
}
# Paddle 3 cannot make its masks.
OF_2 = {"asp.decorate": ("pruned()", 1, 0, "OptimizerWithSparsityGuarantee.step")}


@pytest.mark.parametrize("version", PYTHONS)
def test_each_way_is_one_update(version: str, tmp_path: Path) -> None:
    ways = WAYS | (OF_2 if version < "3" else {})
    watched = "\n".join(
        f"seen.clear(); {call}; report({name!r})" for name, (call, *_) in ways.items()
    )
    proof = """
import json, sys
updates = sys.modules["_fleetrun_inject.updates"]
seen = []
def see(what):
    frame, name = sys._getframe(1), ""
    while frame is not None:
        if frame.f_code.co_name == "update" and "method" in frame.f_locals:
            name = frame.f_locals["method"].__qualname__
        frame = frame.f_back
    seen.append((what, name))
def report(name):
    kinds = [what for what, _ in seen]
    names = "".join({name for _, name in seen})
    print("WAY", json.dumps([name, kinds.count("update"), kinds.count("skip"), names]))
updates.on_update(lambda *_: see("update"), "a test")
updates.on_skipped(lambda *_: see("skip"), "a test")
"""
    script = SCRIPT.replace("WAYS", proof + watched)
    proved, output = alone(version, tmp_path, script, {"strategy": {"fuse_all_reduce_ops": True}})
    assert "3 updates were skipped by a GradScaler: gradients were not finite" in proved["notes"]
    rows = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("WAY ")]
    assert {name: tuple(rest) for name, *rest in rows} == {
        name: tuple(expected) for name, (_, *expected) in ways.items()
    }


LOSSES = """
import paddle
net = paddle.nn.Linear(2, 1)
optimizer = paddle.optimizer.SGD(0.0, parameters=net.parameters())
net.weight.set_value(paddle.ones([2, 1]))
for number in range(1, 5):
    loss = net(paddle.full([1, 2], number)).sum()
    if number == 1:
        loss.backward()
    elif number == 2:
        loss.reshape([1]).backward()
    elif number == 3:
        # As pipelines do.
        paddle.autograd.backward(loss)
    optimizer.step()
"""


@pytest.mark.parametrize("version", PYTHONS)
def test_the_loss_of_every_kind_of_backward_is_recorded(version: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSSES)
    (tmp_path / "strategy.json").write_text(json.dumps(told({"strategy": {}})))
    records = str(tmp_path / "rank.0.jsonl")
    more = {"PYTHONPATH": str(SITE), "FLEETRUN_STOP_AFTER": "9", "FLEETRUN_RECORDS": records}
    more["FLEETRUN_STRATEGY_FILE"] = str(tmp_path / "strategy.json")
    done = run(PYTHONS[version], ["train.py"], tmp_path, **more)
    assert done.returncode == 0, done.stdout
    losses = [update["loss"] for update in rankfile.records(records, "update")]
    assert losses == [2.0, 4.0, 6.0, None], done.stdout
