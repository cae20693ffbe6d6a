"""A model with Paddle's layer of experts, spread over the ranks as `LAYOUT` (JSON) says.

One rank has all experts and all data. The layout has the micro-steps of an update (`merge`) and, if
parameters are sharded, how many ranks share the experts (`ep`), of which others have copies, and
how many have the same data (`mp`); else all ranks are data-parallel and share them. `SPOIL` is
`RANK:PARAMETER`, whose value that rank alone changes after its second update.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle as paddle_
from paddle import nn
from paddle.distributed import fleet as fleet_

paddle: Any = paddle_
fleet: Any = fleet_
layout = json.loads(os.environ["LAYOUT"])
rank, world = (int(os.environ[f"PADDLE_TRAINER{name}"]) for name in ("_ID", "S_NUM"))
UPDATES, ROWS, LENGTH, WIDTH, EXPERTS = 4, 8, 3, 8, 4
STEPS, SHARES = layout.get("merge", 1), min(layout.get("ep", world), world)
MP = min(layout.get("mp", 1), world)
numbers = np.random.RandomState(11)
DATA = [numbers.randn(ROWS, LENGTH, WIDTH).astype("float32") for _ in range(UPDATES * STEPS)]
moe: Any = importlib.import_module("paddle.incubate.distributed.models.moe.moe_layer")


def exchange(x: Any, sent: Any, received: Any, group: Any) -> Any:
    """Send SENT rows of X, in order, to each rank and expert; return the RECEIVED rows."""
    counts = [tensor.numpy().reshape(SHARES, -1).sum(1).tolist() for tensor in (sent, received)]
    out = paddle.empty([sum(counts[1]), x.shape[1]], x.dtype)
    outs, ins = ([*paddle.split(rows, n)] for rows, n in ((out, counts[1]), (x, counts[0])))
    wait = paddle.distributed.alltoall(outs, ins, group=group)
    if wait is not None:
        wait.wait()
    return paddle.concat(outs)


def order(counts: Any, *, by_rank: bool) -> list[int]:
    """Return the order of rows, COUNTS for each rank and expert, sorted by rank or by expert."""
    table = counts.numpy().reshape(SHARES, -1)
    rows = np.arange(table.sum())
    parts = np.split(rows, np.cumsum(table.reshape(-1))[:-1])
    experts = table.shape[1]
    by_expert = np.concatenate(
        [parts[r * experts + e] for e in range(experts) for r in range(SHARES)]
    )
    return list(np.argsort(by_expert) if by_rank else by_expert)


def scatter(x: Any, local: Any, received: Any, group: Any = None) -> Any:
    """Do as Paddle's own, which crashes on a plug-in's device that lacks the kernel."""
    rows = exchange(x, local, received, group)
    where = order(received, by_rank=False)
    return paddle.to_tensor(rows.numpy()[where])


def gather(x: Any, local: Any, received: Any, group: Any = None) -> Any:
    where = order(received, by_rank=True)
    return exchange(paddle.to_tensor(x.numpy()[where]), received, local, group)


moe.global_scatter, moe.global_gather = scatter, gather


class Expert(nn.Layer):  # type: ignore[misc, unused-ignore]
    """The expert NUMBER of the whole model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        own = np.random.RandomState(number)
        for parameter in self.parameters():
            parameter.set_value((own.randn(*parameter.shape) * 0.3).astype("float32"))

    def forward(self, x: Any) -> Any:
        return shared(self.down, shared(self.up, x).tanh())


def shared(layer: Any, x: Any) -> Any:
    """Call LAYER, whose gradients are divided: each rank's loss is the mean of its own rows only.

    Not by a hook, which Paddle's for `main_grad` does not expect.
    """
    weight, bias = (
        parameter / SHARES + (parameter - parameter / SHARES).detach()
        for parameter in (layer.weight, layer.bias)
    )
    return nn.functional.linear(x, weight, bias)


def model(group: Any, copies: Any) -> Any:
    """Return the model with this rank's part of the experts of GROUP; COPIES hold the same ones."""
    own = EXPERTS // SHARES
    first = own * (group.rank if group else 0)
    experts = nn.LayerList([Expert(first + number) for number in range(own)])
    for parameter in experts.parameters():
        if copies:
            parameter.color = {"color": "moe_expert", "group": copies}
        # Otherwise fleet gives the first rank's expert to all.
        parameter.no_sync = group is not None
        # Otherwise fleet broadcasts its bias along mp.
        parameter.is_distributed = MP > 1
    layer = moe.MoELayer(WIDTH, experts, gate={"type": "naive", "top_k": 2}, moe_group=group)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))
    fixed = np.random.RandomState(99)
    for name, parameter in net.named_parameters():
        if "experts" not in name:
            parameter.set_value((fixed.randn(*parameter.shape) * 0.3).astype("float32"))
    return net


def spoil(net: Any) -> None:
    """Change the parameter that `SPOIL` names, before ranks are compared."""
    bad, _, name = os.environ["SPOIL"].partition(":")
    counted: Any = sys.modules["_fleetrun_inject.updates"]
    ends: list[int] = []

    def change(_optimizer: Any, number: int) -> None:
        ends.append(number)
        if (len(ends), rank) == (2, int(bad)):
            parameter = dict(net.named_parameters())[name]
            parameter.set_value(parameter.numpy() + 1e-2)

    counted.on_update(change, "a test")
    counted._after.insert(0, counted._after.pop())


def main() -> dict[str, Any]:
    strategy = fleet.DistributedStrategy()
    degrees: dict[str, Any] = {"dp_degree": world}
    if "ep" in layout:
        degrees = {"dp_degree": 1, "sharding_degree": world // MP, "mp_degree": MP}
        degrees |= {"ep_degree": SHARES, "moe_sharding_degree": world // SHARES}
        degrees |= {"order": ["dp", "moe_sharding", "sharding", "pp", "sep", "ep", "mp"]}
        strategy.strategy.hybrid_configs.sharding_configs.split_param = True
    strategy.hybrid_configs = degrees
    fleet.init(is_collective=True, strategy=strategy)
    hcg = fleet.get_hybrid_communicate_group()
    group = copies = None
    if world > 1 and "ep" in layout:
        group, copies = hcg.get_expert_parallel_group(), hcg.get_moe_sharding_parallel_group()
    elif world > 1:
        group = hcg.get_data_parallel_group()
    net = model(group, copies)
    optimizer = paddle.optimizer.AdamW(0.02, parameters=net.parameters(), weight_decay=0.01)
    trained = net
    if world > 1 and layout.get("main_grad"):
        mixed: Any = fleet.utils.mix_precision_utils
        mixed.MixPrecisionLayer(net)
        optimizer = mixed.MixPrecisionOptimizer(optimizer)
    if world > 1:
        trained, optimizer = fleet.distributed_model(net), fleet.distributed_optimizer(optimizer)
    if world > 1 and os.environ.get("SPOIL"):
        spoil(net)
    for number, batch in enumerate(DATA, 1):
        loss = (trained(paddle.to_tensor(np.split(batch, world // MP)[rank // MP])) ** 2).mean()
        is_whole = world == 1
        (loss / STEPS if is_whole else loss).backward()
        if world > 1 or number % STEPS == 0:
            optimizer.step()
            optimizer.clear_grad()
    proof = getattr(sys.modules.get("_fleetrun_inject.settings"), "_proof", None)
    return {
        "first": EXPERTS // SHARES * (group.rank if group else 0),
        "weights": {name: parameter.numpy().tolist() for name, parameter in net.named_parameters()},
        "updates": getattr(sys.modules.get("_fleetrun_inject.updates"), "count", int)(),
        "notes": proof._notes if proof else [],
    }


Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(main()), encoding="utf-8")
