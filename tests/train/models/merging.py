"""Trains with four micro-batches or one four times as large; prints weights and allreduces."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

STEPS = 4
merges = bool(os.environ.get("FLEETRUN_STRATEGY_FILE"))
rank = int(os.environ["PADDLE_TRAINER_ID"])
calls = [0]
plain = core.ProcessGroup.all_reduce


def counted(*args: Any) -> Any:
    calls[0] += 1
    return plain(*args)


setattr(core.ProcessGroup, "all_reduce", counted)
paddle.distributed.init_parallel_env()
report = {}
for name in ("SGD", "Momentum", "Adam", "AdamW"):
    paddle.seed(5)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = paddle.DataParallel(net)
    rate = paddle.optimizer.lr.StepDecay(0.01, step_size=2, gamma=0.5)
    optimizer = getattr(paddle.optimizer, name)(
        rate,
        parameters=model.parameters(),
        grad_clip=nn.ClipGradByGlobalNorm(0.05),
        weight_decay=0.01,
    )
    numbers = np.random.RandomState(rank)
    made = []
    for _ in range(3):
        large = numbers.randn(STEPS * 4, 8).astype("float32")
        for batch in np.split(large, STEPS) if merges else [large]:
            before = calls[0]
            loss = (model(paddle.to_tensor(batch)) ** 2).mean()
            loss.backward()
            made.append(calls[0] - before)
            if name == "Adam":
                optimizer.minimize(loss)
            else:
                optimizer.step()
            if name == "Momentum":
                for each in net.parameters():
                    each.clear_gradient()
            else:
                optimizer.clear_grad()
            rate.step()
    weights = [float(value) for each in net.parameters() for value in each.numpy().ravel()]
    report[name] = {"weights": weights, "allreduces": made, "rate": optimizer.get_lr()}
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
