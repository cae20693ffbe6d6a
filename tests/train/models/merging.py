"""Trains with four micro-batches, or with one batch four times as large; prints the results."""

from __future__ import annotations

import os
from typing import Any

import paddle
from counting import observe
from paddle import nn
from twins import batches, rank, weights, write

STEPS = 4
merges = bool(os.environ.get("FLEETRUN_STRATEGY_FILE"))
# Agreements of ranks, which are integers, count as well.
calls = [0]


def count(_name: str, _group: Any, _tensor: Any) -> None:
    calls[0] += 1


observe(count, "all_reduce")
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
    drawn, made = batches([rank], STEPS * 4, 8), []
    for _ in range(3):
        large = next(drawn)
        for batch in paddle.split(large, STEPS) if merges else [large]:
            before = calls[0]
            loss = (model(batch) ** 2).mean()
            loss.backward()
            made.append(calls[0] - before)
            if name == "Adam":
                optimizer.minimize(loss)
            else:
                optimizer.step()
            if name == "Momentum":
                for parameter in net.parameters():
                    parameter.clear_gradient()
            else:
                optimizer.clear_grad()
            rate.step()
    report[name] = {"weights": weights(net), "allreduces": made, "rate": optimizer.get_lr()}
write(report)
