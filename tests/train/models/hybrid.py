"""A hybrid-parallel job on random data, as `LAYOUT` (JSON) says.

One rank trains the whole model, or with a list of layouts the model of each.

The layout has the degrees of `hybrid_configs`, the micro-steps of an update, by the strategy
(`merge`) and by the script (`accumulate`), the `stage` of sharding, and `sharding_configs`. With
`infinite`, losses are scaled, and one rank's is infinite in that micro-step.
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
from paddle.distributed import fleet
from twins import elsewhere

fleet_: Any = fleet
layout = json.loads(os.environ["LAYOUT"])
layouts = layout if isinstance(layout, list) else [layout]
layout = layouts[0]
degree = {name: layout.get(name, 1) for name in ("dp", "mp", "pp", "sharding", "sep")}
rank, world = (int(os.environ[f"PADDLE_TRAINER{name}"]) for name in ("_ID", "S_NUM"))
ACCUMULATE = layout.get("accumulate", 1)
UPDATES, ROWS, WIDTH, HIDDEN = 3, 16, 8, 12
numbers = np.random.RandomState(7)
# The parameters of the whole model, in its order.
SHAPES = {"up.w": (WIDTH, HIDDEN), "up.b": (HIDDEN,), "down.w": (HIDDEN, WIDTH), "down.b": (WIDTH,)}
SHAPES |= {"norm.w": (WIDTH,), "norm.b": (WIDTH,), "head.w": (WIDTH, 4), "head.b": (4,)}
WHOLE = {name: (numbers.randn(*shape) * 0.3).astype("float32") for name, shape in SHAPES.items()}
# The axis of each parameter that is split along mp.
CUT = {"up.w": 1, "up.b": 0, "down.w": 0} if degree["mp"] > 1 else {}


def steps_of(layout: dict[str, Any]) -> int:
    """Return the micro-steps of an update."""
    return int(layout.get("accumulate", 1) * layout.get("merge", 1))


def data(layout: dict[str, Any]) -> list[Any]:
    """Return the batch of each micro-step."""
    draw, number = np.random.RandomState(8), UPDATES * steps_of(layout)
    return [draw.randn(ROWS, WIDTH).astype("float32") for _ in range(number)]


def part(name: str, value: Any, mp_rank: int | None) -> Any:
    """Return MP_RANK's part of VALUE, the parameter NAME; all of it if MP_RANK is None."""
    if name not in CUT or mp_rank is None:
        return value
    return np.split(value, degree["mp"], CUT[name])[mp_rank]


def loss_of(output: Any, _label: Any = None) -> Any:
    return (output**2).mean()


def layers(*, parallel: bool) -> list[Any]:
    """Return the model's layers, split along mp if PARALLEL."""
    if parallel and degree["mp"] > 1:
        mp = fleet_.meta_parallel
        up = mp.ColumnParallelLinear(WIDTH, HIDDEN, has_bias=True, gather_output=False)
        down = mp.RowParallelLinear(HIDDEN, WIDTH, has_bias=True, input_is_parallel=True)
    else:
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    return [up, nn.Tanh(), down, nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]


def fill(made: list[Any], mp_rank: int | None) -> dict[str, Any]:
    """Set the parameters of the layers MADE, None for those of other ranks; return them by name."""
    drawn = {}
    for prefix, layer in zip(("up", "", "down", "norm", "", "head"), made, strict=True):
        if layer is None or not prefix:
            continue
        for end, parameter in (("w", layer.weight), ("b", layer.bias)):
            name = f"{prefix}.{end}"
            parameter.set_value(part(name, WHOLE[name], mp_rank))
            drawn[name] = parameter
    return drawn


def optimizer_of(net: Any) -> Any:
    clip = nn.ClipGradByGlobalNorm(0.5) if os.environ.get("CLIP", "1") == "1" else None
    parameters = net.parameters()
    if os.environ.get("SGD"):
        return paddle.optimizer.SGD(0.1, parameters=parameters, grad_clip=clip)
    options: dict[str, Any] = {"grad_clip": clip, "weight_decay": 0.01}
    optimizer: Any = paddle.optimizer.AdamW(0.02, parameters=parameters, **options)
    if world > 1 and layout.get("main_grad"):
        # The layer is used for its hooks only.
        mixed: Any = fleet_.utils.mix_precision_utils
        mixed.MixPrecisionLayer(net)
        optimizer = mixed.MixPrecisionOptimizer(optimizer)
    return optimizer


def alone(layout: dict[str, Any]) -> dict[str, Any]:
    """Train the whole model on all data."""
    steps = steps_of(layout)
    made = layers(parallel=False)
    net = nn.Sequential(*made)
    parameters, optimizer = fill(made, None), optimizer_of(net)
    skipped = {-(-layout.get("infinite", 0) // steps)}
    for number, rows in enumerate(data(layout), 1):
        (loss_of(net(paddle.to_tensor(rows))) / steps).backward()
        if number % steps == 0:
            if number // steps not in skipped:
                optimizer.step()
            optimizer.clear_grad()
    return {name: parameter.numpy().tolist() for name, parameter in parameters.items()}


def init() -> None:
    """Initialise fleet with the layout."""
    strategy = fleet_.DistributedStrategy()
    configs: dict[str, Any] = {f"{name}_degree": size for name, size in degree.items()}
    if degree["mp"] > 1:
        # All ranks have the data, and Paddle cannot broadcast it on CPUs.
        configs["mp_configs"] = {"need_broadcast_data": False}
    if degree["mp"] > 1 and degree["sep"] > 1:
        # Otherwise Paddle counts gradients that are split along mp once for each rank along sep.
        configs["split_norm_comm"] = True
    strategy.hybrid_configs = configs
    for section in ("sharding_configs", "pp_configs", "mp_configs"):
        for name, value in layout.get(section, {}).items():
            setattr(getattr(strategy.strategy.hybrid_configs, section), name, value)
    if degree["pp"] > 1:
        strategy.pipeline_configs = {
            "accumulate_steps": ACCUMULATE,
            "micro_batch_size": ROWS // (degree["dp"] * degree["sharding"] * degree["sep"]),
        }
    fleet_.init(is_collective=True, strategy=strategy)


def distributed(net: Any, hcg: Any) -> tuple[Any, Any, Any]:
    """Return NET, its optimizer and its scaler, if any, as Paddle distributes them."""
    stage = layout.get("stage", 1)
    scaler: Any = None
    if "infinite" in layout:
        # Otherwise Paddle scales nothing. The scale is a power of two, so exact, and constant.
        scalers: Any = paddle.amp.grad_scaler
        scalers.amp_global_state().amp_dtype = "float16"
        scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=100)
    if stage > 1:
        sharded: Any = paddle.distributed.sharding.group_sharded_parallel
        level = {2: "os_g", 3: "p_g_os"}[stage]
        # Otherwise such small parameters are not sharded.
        groups = {"group": hcg.get_sharding_parallel_group()}
        if degree["dp"] > 1:
            groups["dp_group"] = hcg.get_data_parallel_group()
        model, optimizer, scaler = sharded(
            *(net, optimizer_of(net), level),
            scaler=scaler,
            segment_size=layout.get("segment", 16),
            **groups,
        )
    else:
        optimizer = optimizer_of(net)
        model = fleet_.distributed_model(net)
        optimizer = fleet_.distributed_optimizer(optimizer)
        scaler = scaler and fleet_.distributed_scaler(scaler)
    return model, optimizer, scaler


def together() -> tuple[dict[str, Any], int]:
    """Train as one rank of the job; return its parameters, and its place along mp."""
    init()
    hcg = fleet_.get_hybrid_communicate_group()
    places = [hcg.get_data_parallel_rank(), hcg.get_sharding_parallel_rank()]
    share, shares = places[0] * degree["sharding"] + places[1], degree["dp"] * degree["sharding"]
    if degree["sep"] > 1:
        share, shares = share * degree["sep"] + hcg.get_sep_parallel_rank(), shares * degree["sep"]
    mp_rank = hcg.get_model_parallel_rank()
    rows = [np.split(array, shares)[share] for array in data(layout)]
    if degree["pp"] > 1:
        return pipeline(rows, mp_rank), mp_rank
    made = layers(parallel=True)
    net: Any = nn.Sequential(*made)
    parameters = fill(made, mp_rank)
    model, optimizer, scaler = distributed(net, hcg)
    for number, batch in enumerate(rows, 1):
        # The sums over sep are not averaged.
        output = model(paddle.to_tensor(batch))
        loss = loss_of(output) / ACCUMULATE / degree["sep"]
        if number == layout.get("infinite") and rank == world - 1:
            loss = loss * float("inf")
        (scaler.scale(loss) if scaler else loss).backward()
        if number % ACCUMULATE == 0:
            if layout.get("by_hand"):
                step_by_hand(optimizer)
            elif scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                with elsewhere():
                    optimizer.step()
            optimizer.clear_grad()
    if layout.get("stage") == 3:
        model.get_all_parameters()
    return {name: parameter.numpy() for name, parameter in parameters.items()}, mp_rank


def step_by_hand(optimizer: Any) -> None:
    """Average the gradients and update as PaddleNLP's and PaddleFormers' Trainers do."""
    hcg = fleet_.get_hybrid_communicate_group()
    own = list(optimizer._inner_opt._parameter_list)
    utilities: Any = fleet_.utils.hybrid_parallel_util
    utilities.fused_allreduce_gradients(own, hcg)
    optimizer._step(own)


def pipeline(rows: list[Any], mp_rank: int) -> dict[str, Any]:
    made: list[Any] = layers(parallel=True)
    model = fleet_.meta_parallel.PipelineLayer(
        layers=made,
        num_stages=degree["pp"],
        # The sums over sep are not averaged.
        loss_fn=lambda *args: loss_of(*args) / degree["sep"],
        topology=fleet_.fleet._hcg._topo,
    )
    kept = {id(layer) for layer in model.sublayers()}
    parameters = fill([layer if id(layer) in kept else None for layer in made], mp_rank)
    parallel = fleet_.distributed_model(model)
    optimizer = fleet_.distributed_optimizer(optimizer_of(model))
    for first in range(0, len(rows), ACCUMULATE):
        batch = paddle.to_tensor(np.concatenate(rows[first : first + ACCUMULATE]))
        parallel.train_batch([batch, batch], optimizer)
    return {name: parameter.numpy() for name, parameter in parameters.items()}


def report() -> Any:
    if world == 1:
        reports = [{"weights": alone(whole)} for whole in layouts]
        return reports if len(reports) > 1 else reports[0]
    ours, place = together()
    hcg = fleet_.get_hybrid_communicate_group()
    groups = {
        "dp": hcg.get_data_parallel_group,
        "sharding": hcg.get_sharding_parallel_group,
        "sep": hcg.get_sep_parallel_group,
    }
    whole = json.loads(Path(os.environ["ALONE"]).read_text())["weights"]
    theirs = {name: np.array(whole[name], "float32") for name in ours}
    return {
        "apart": max(float(abs(part(n, theirs[n], place) - ours[n]).max()) for n in ours),
        "moved": max(float(abs(part(n, WHOLE[n], place) - ours[n]).max()) for n in ours),
        # The group of the first axis along which gradients are summed.
        "group": next((groups[axis]().ranks for axis in groups if degree[axis] > 1), []),
        "updates": getattr(sys.modules.get("_fleetrun_inject.updates"), "count", int)(),
    }


Path(f"{os.environ['OUTPUT']}.{rank}").write_text(json.dumps(report()), encoding="utf-8")
