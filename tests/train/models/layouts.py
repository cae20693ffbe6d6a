"""Trains fleet's hybrid layouts, in WAYS that a test names: `dp=2,mp=2`, `sharding=2:stage 3`.

After a `:` come words of the layout; `!RANK:PARAMETER` perturbs that parameter of one rank after
its second update. Reports the counts, comparisons and remarks of each way.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet import meta_parallel

AXES = ("dp", "mp", "pp", "sharding", "sep")
UPDATES, PIPELINED = 4, 2
rank = int(os.environ["PADDLE_TRAINER_ID"])
fleet: Any = paddle.distributed.fleet
proof: Any = sys.modules["_fleetrun_inject.settings"]._proof
counted: Any = sys.modules["_fleetrun_inject.updates"]
hooked: set[str] = set()
spoiling: list[Any] = []


def see(_optimizer: Any, _number: int) -> None:
    """Note the hooked function of Paddle."""
    frame, name = sys._getframe(), ""
    while frame is not None:
        if frame.f_code.co_name == "update" and "method" in frame.f_locals:
            name = frame.f_locals["method"].__qualname__
        frame = frame.f_back  # type: ignore[assignment]
    hooked.add(name.replace("<locals>.", ""))


counted.on_update(see, "a test")


class Summed(paddle.autograd.PyLayer):  # type: ignore[misc, unused-ignore]
    """Sums over a group, in forward or backward; Paddle's own operator has no CPU kernel."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, *, forward: bool) -> Any:
        ctx.group, ctx.backward_too = group, not forward
        return Summed.summed(x, group) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        (gradient,) = args
        return Summed.summed(gradient, ctx.group) if ctx.backward_too else gradient.clone()

    @staticmethod
    def summed(x: Any, group: Any) -> Any:
        x = x.clone()
        paddle.distributed.all_reduce(x, group=group)
        return x


summed: Any = Summed.apply


class Block(nn.Layer):  # type: ignore[misc, unused-ignore]
    """A transformer layer without attention; its weights are split among PARTS ranks."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.norm, self.up, self.down = (
            nn.LayerNorm(8),
            nn.Linear(8, 16 // parts),
            nn.Linear(16 // parts, 8),
        )
        for parameter in (self.up.weight, self.up.bias, self.down.weight):
            parameter.is_distributed = parts > 1

    def forward(self, x: Any) -> Any:
        group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
        hidden = self.norm(x)
        if self.parts > 1:
            hidden = summed(hidden, group, forward=False)
        hidden = self.up(hidden).tanh()
        if self.parts > 1:
            hidden = summed(hidden @ self.down.weight, group, forward=True) + self.down.bias
        else:
            # The random state differs among ranks, and so does its input.
            hidden = nn.functional.dropout(self.down(hidden), 0.1)
        return x + hidden


class Ends(nn.Layer):  # type: ignore[misc, unused-ignore]
    """The first and the last layer of a pipeline, which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)

    @property
    def weight(self) -> Any:
        """The shared weight."""
        return self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.embed(x)


def last(ends: Ends, x: Any) -> Any:
    return x @ ends.weight.t()


def pipeline(groups: Any, parts: int) -> Any:
    made: Any = meta_parallel
    stages = groups.get_pipe_parallel_world_size()
    ends = made.SharedLayerDesc("ends", Ends, shared_weight_attr="weight")
    other = made.SharedLayerDesc("ends", Ends, forward_func=last, shared_weight_attr="weight")
    blocks = [made.LayerDesc(Block, parts) for _ in range(2 * stages - 2)]
    return made.PipelineLayer(
        [ends, *blocks, other], topology=groups.topology(), loss_fn=nn.MSELoss()
    )


def begin(degrees: dict[str, int], words: str) -> Any:
    """Initialise fleet with DEGREES; return its groups."""
    strategy = fleet.DistributedStrategy()
    configs: dict[str, Any] = {f"{axis}_degree": degrees.get(axis, 1) for axis in AXES}
    # Otherwise Paddle broadcasts biases and LayerNorms after each update and repairs the fault.
    strategy.hybrid_configs["mp_configs"].sync_param = "unsynced" not in words
    strategy.hybrid_configs = configs
    if "pp" in degrees:
        strategy.pipeline_configs = {"accumulate_steps": PIPELINED, "micro_batch_size": 2}
    # Otherwise fleet keeps the groups of the last layout.
    topology: Any = sys.modules["paddle.distributed.fleet.base.topology"]
    topology._HYBRID_PARALLEL_GROUP = None
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group()


def distributed(net: Any, groups: Any, words: str) -> tuple[Any, Any]:
    """Return NET and its optimizer as Paddle distributes them."""
    optimizer: Any = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
    for level, stage in (("os_g", "stage 2"), ("p_g_os", "stage 3")):
        if stage in words:
            sharded: Any = paddle.distributed.sharding
            options = {"segment_size": 16} if level == "p_g_os" else {}
            if groups.get_data_parallel_world_size() > 1:
                options["dp_group"] = groups.get_data_parallel_group()
            model, optimizer, _ = sharded.group_sharded_parallel(
                *(net, optimizer, level),
                group=groups.get_sharding_parallel_group(),
                offload="offload" in words,
                **options,
            )
            return model, optimizer
    return fleet.distributed_model(net), fleet.distributed_optimizer(optimizer)


def train(way: str) -> dict[str, Any]:
    """Train in this WAY; return its report."""
    way, _, bad = way.partition("!")
    layout, _, words = way.partition(":")
    degrees = {axis: int(size) for axis, _, size in (e.partition("=") for e in layout.split(","))}
    groups = begin(degrees, words)
    paddle.seed(5)
    if "pp" in degrees:
        net = pipeline(groups, degrees.get("mp", 1))
    else:
        net = nn.Sequential(*(Block(degrees.get("mp", 1)) for _ in range(2)))
    model, optimizer = distributed(net, groups, words)
    if bad:
        spoil_late(model, *bad.split(":"))
    notes, before = len(proof._notes), counted.count()
    data = groups.get_data_parallel_rank() * 2 + groups.get_sharding_parallel_rank()
    numbers = np.random.RandomState(data)
    for _ in range(UPDATES):
        x = paddle.to_tensor(numbers.randn(4, 8).astype("float32"))
        if "pp" in degrees:
            model.train_batch([x, x], optimizer)
            continue
        # Paddle cannot broadcast the input of an `mp` model between CPUs.
        forward = net if "mp" in degrees and x.place.is_cpu_place() else model
        loss = (forward(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    return {
        "hooked": sorted(hooked),
        "updates": counted.count() - before,
        "notes": proof._notes[notes:],
        "ranks": proof.counts.pop("ranks_compared", 0),
        "parameters": proof.counts.pop("parameters_compared", 0),
        "equal": proof.ranks_equal,
    }


def spoil_late(model: Any, bad_rank: str, name: str) -> None:
    """Change the parameter of MODEL whose name ends in NAME once all ranks have sent theirs."""
    counts: list[int] = []

    def spoil(_optimizer: Any, number: int) -> None:
        counts.append(number)
        if len(counts) == 2 and rank == int(bad_rank):
            parameters = [
                value for known, value in model.named_parameters() if known.endswith(name)
            ]
            parameter = getattr(parameters[0], "fw_storage", parameters[0])
            parameter.set_value(parameter.numpy() + 1e-2)

    counted.on_update(spoil, "a test")
    spoiling.append(counted._after.pop())
    # This precedes the comparison after updates 1 and 3, with `auto` also 2.
    counted._after.insert(0, spoiling[-1])


report = {}
for way in os.environ["WAYS"].split(";"):
    proof.ranks_equal = None
    proof._notes.clear()
    hooked.clear()
    report[way] = train(way)
    while spoiling:
        counted._after.remove(spoiling.pop())
Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report))
