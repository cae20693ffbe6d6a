"""Trains static programs of several kinds under a strategy that the script does not mention.

Beside each it trains the same network without fleet on the whole batch of all ranks and all merged
runs: data parallel and gradient merge must equal that. The script counts by itself.
"""

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

rank, ranks = (int(os.environ[f"PADDLE_TRAINER{name}"]) for name in ("_ID", "S_NUM"))
os.environ["FLEETRUN_RECORDS"] = f"rank.{rank}.jsonl"
os.environ["FLAGS_enable_pir_api"] = "0"
import numpy as np  # Paddle reads the environment when it is imported
import paddle
from paddle import nn
from paddle.base import core

if os.environ.get("BUILD") == "gpu":
    # Paddle's builds for GPUs answer like this on a machine without any.
    for name, answer in (("is_compiled_with_cuda", True), ("get_cuda_device_count", 0)):
        setattr(core, name, lambda answer=answer: answer)
    for module in (paddle, paddle.device):
        setattr(module, "is_compiled_with_cuda", core.is_compiled_with_cuda)
static: Any = paddle.static
fleet: Any = paddle.distributed.fleet
wanted = json.loads(sys.argv[1])
MERGED, BATCH = wanted.get("merged", 1), 4
UPDATES = 2
NORM = 0.1
# BatchNorm's statistics are those of each batch, and clipping is done by the norm of the mean.
BY_HAND = ("norm", "clip")
ALLREDUCES = ("c_allreduce_sum", "all_reduce")
# The calls of each gloo communicator that is made here, and its number of ranks.
calls: dict[str, int] = {}
connect = core.ProcessGroupGloo.create


class Counted:
    """A communicator that counts its calls."""

    def __init__(self, group: Any, size: int, number: int) -> None:
        self._group = group
        self._name = f"{size} ranks, {number}"

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            key = f"{name}, {self._name}"
            calls[key] = calls.get(key, 0) + 1
            return getattr(self._group, name)(*args)

        return call


def counting(store: Any, place: int, size: int, number: int) -> Counted:
    """Make a communicator that counts."""
    return Counted(connect(store, place, size, number), size, number)


setattr(core.ProcessGroupGloo, "create", staticmethod(counting))
paddle.enable_static()
fleet.init(is_collective=True)


def optimizer(case: str) -> Any:
    """Make the optimizer of CASE."""
    made: Any = paddle.optimizer
    # With its default, small gradients amplify rounding.
    adams = {"epsilon": 1e-3}
    factories = {
        "momentum": lambda: made.Momentum(0.05, weight_decay=0.01),
        "adam": lambda: made.Adam(0.05, **adams),
        "adamw": lambda: made.AdamW(0.05, weight_decay=0.1, **adams),
        "clip": lambda: made.SGD(0.05, grad_clip=nn.ClipGradByGlobalNorm(NORM), weight_decay=0.01),
        "rate": lambda: made.SGD(made.lr.ExponentialDecay(0.05, 0.5)),
        # Their strategies replace these by what `replacement` makes.
        "lars": lambda: made.Momentum(0.05),
        "lamb": lambda: made.Adam(0.05, **adams),
    }
    return factories.get(case, lambda: made.SGD(0.05))()


def replacement(case: str) -> Any:
    """Make the optimizer that CASE trains with in the end."""
    if case == "lars":
        incubated: Any = paddle.incubate.optimizer
        kind = incubated.LarsMomentumOptimizer
        return kind(0.05, 0.9, lars_coeff=0.1, lars_weight_decay=0.02, epsilon=1e-3)
    if case == "lamb":
        return paddle.optimizer.Lamb(0.05, lamb_weight_decay=0.02, epsilon=1e-3)
    return optimizer(case)


def special(case: str, x: Any, hidden: Any) -> Any:
    """Add the layers of CASE that other cases lack to HIDDEN; X is the network's input."""
    if case == "bias":
        image = nn.Conv2D(2, 2, 1)(paddle.reshape(hidden, [-1, 2, 2, 2]))
        hidden = paddle.flatten(nn.functional.relu(image), 1)
    if case == "depthwise":
        image = paddle.reshape(hidden - 0.1, [-1, 2, 2, 2])
        image = nn.Conv2D(2, 2, 2, groups=2, bias_attr=False)(nn.functional.relu(image))
        hidden = paddle.flatten(image, 1)
    if case == "transposed":
        weight = static.create_parameter([8, 8], "float32")
        hidden = hidden @ weight.T
    if case == "sparse":
        rows = paddle.cast(x > 0, "int64")
        hidden = hidden + paddle.sum(static.nn.embedding(rows, [2, 8], is_sparse=True), axis=1)
    if case == "branches":
        # Paddle sums the gradients of both branches in the order of a set of names.
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        hidden = static.nn.cond(paddle.ones([1]) > 0, lambda: layers(x), lambda: layers(x) * 2)
    return hidden


def network(case: str) -> Any:
    """Build the network of CASE in the default program; return its loss."""
    x, y = static.data("x", [None, 8]), static.data("y", [None, 1])
    x.stop_gradient = case != "penalty"
    hidden = x
    for _ in range(3):
        hidden = nn.functional.relu(nn.Linear(8, 8)(hidden))
        if case == "norm":
            hidden = nn.BatchNorm1D(8)(hidden)
    hidden = special(case, x, hidden)
    out = nn.Linear(hidden.shape[1], 1)(hidden)
    loss = paddle.mean(nn.functional.square_error_cost(out, y))
    if case == "penalty":
        (slope,) = static.gradients([out], [x])
        loss += paddle.mean(slope * slope)
    if case == "scaled":
        loss *= 3
    if case == "logged":
        shown = paddle.assign(loss)
        shown.stop_gradient = True
        paddle.distributed.all_reduce(shown)
    return loss


def program(case: str, *, is_shared: bool) -> tuple[Any, Any, Any, Any]:
    """Build CASE, with fleet if IS_SHARED; return its programs, loss and optimizer."""
    main, startup = static.Program(), static.Program()
    method = optimizer(case) if is_shared else replacement(case)
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        loss = network(case)
        parameters = main.all_parameters()
        chosen = (parameters[2:], {parameters[2]}) if case == "chosen" else ()
        shared = fleet.distributed_optimizer(method) if is_shared else method
        if is_shared:
            shared.minimize(loss, startup, *chosen)
            if case == "losses":
                shared.minimize(loss * 2, startup)
            if case == "averaged":
                paddle.incubate.ModelAverage(0.5)
            if case == "clipped by hand":
                paddle.assign(paddle.clip(parameters[0], -0.1, 0.1), parameters[0])
            if case == "averaged by hand":
                mean = static.create_global_var([8, 8], 0.0, "float32", persistable=True)
                paddle.assign(mean * 0.9 + parameters[0] * 0.1, mean)
            for parameter in main.all_parameters():
                # As a script that unfreezes a model does; statistics stay untrained.
                parameter.trainable = True
        elif case in BY_HAND:
            main.gradients = static.append_backward(loss)
        else:
            method.minimize(loss, startup, *chosen)
        if case == "kept":
            keep(main.global_block().var("x"), parameters)
    return main, startup, loss, method


def keep(x: Any, parameters: list[Any]) -> None:
    """Copy PARAMETERS, and measure with them, as scripts do after `minimize`."""
    copied = static.create_global_var([8, 8], 0.0, "float32", persistable=True)
    paddle.assign(parameters[0], copied)
    seen = static.create_global_var([8], 0.0, "float32", persistable=True)
    paddle.assign(seen + paddle.mean(x @ parameters[0], 0), seen)


def value(name: str) -> Any:
    """Return the tensor NAME of the scope."""
    return static.global_scope().find_var(name).get_tensor()


def values(main: Any) -> dict[str, Any]:
    """Return the parameters of MAIN that are trained."""
    return {
        parameter.name: np.array(value(parameter.name))
        for parameter in sorted(main.all_parameters(), key=lambda parameter: str(parameter.name))
        if not parameter.stop_gradient
    }


def beginning(main: Any) -> dict[str, Any]:
    """Return the initial values of the parameters of MAIN, by name."""
    return {
        name: np.random.RandomState(zlib.crc32(name.encode()))
        .uniform(-0.5, 0.5, array.shape)
        .astype("float32")
        for name, array in values(main).items()
    }


def schedule(method: Any) -> None:
    """Call what scripts call after each step."""
    if isinstance(method._learning_rate, paddle.optimizer.lr.LRScheduler):
        method._learning_rate.step()


def data(update: int) -> list[Any]:
    """Return the batches of one UPDATE: for each run, for each rank."""
    x = np.random.RandomState(update).randn(MERGED, ranks, BATCH, 8).astype("float32")
    return [[{"x": part, "y": part.sum(1, keepdims=True) * 0.3} for part in run] for run in x]


def whole(update: int) -> dict[str, Any]:
    """Return all batches of one UPDATE, concatenated."""
    parts = [part for run in data(update) for part in run]
    return {name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")}


def descend(main: Any, update: int, *, clips: bool) -> None:
    """Update MAIN, which has no optimizer, by the mean of its gradients in all batches."""
    grads = [grad for _, grad in main.gradients]
    runs = [executor.run(main, feed=part, fetch_list=grads) for run in data(update) for part in run]
    means = [np.mean(made, 0) for made in zip(*runs, strict=True)]
    norm = np.sqrt(sum(np.sum(mean**2) for mean in means))
    for (parameter, _), mean in zip(main.gradients, means, strict=True):
        tensor = value(parameter.name)
        old = np.array(tensor)
        step = mean * (NORM / max(norm, NORM)) + 0.01 * old if clips else mean
        tensor.set((old - 0.05 * step).astype("float32"), core.CPUPlace())


def put(arrays: dict[str, Any]) -> None:
    """Set parameters."""
    for name, array in arrays.items():
        value(name).set(array, core.CPUPlace())


def count(main: Any) -> dict[str, Any]:
    """Count the operators of MAIN, and the bytes of its allreduces."""
    ops: dict[str, int] = {}
    inside: dict[str, list[str]] = {}
    sizes = []
    for block in main.blocks:
        for op in block.ops:
            ops[op.type] = ops.get(op.type, 0) + 1
            if op.type == "coalesce_tensor":
                inside[op.output("FusedOutput")[0]] = op.input("Input")
            elif op.type in ALLREDUCES:
                name = op.input_arg_names[0]
                sizes.append(
                    [
                        4 * int(np.prod(block._find_var_recursive(variable).shape))
                        for variable in inside.get(name, [name])
                    ]
                )
    order = [op.type for block in main.blocks for op in block.ops]
    return {"ops": ops, "sizes": sizes, "order": order}


def beside(case: str, main: Any) -> tuple[Any, Any]:
    """Return the program of CASE that runs after each run of MAIN, and its startup program."""
    if case == "shared":
        return program(case, is_shared=True)[:2]
    return (main.clone(for_test=True) if case == "chosen" else None), None


def train(case: str) -> dict[str, Any]:
    """Train CASE; return what was counted, its parameters, and what they should be."""
    main, startup, loss, method = program(case, is_shared=True)
    before = dict(calls)
    other, start_other = beside(case, main)
    with static.scope_guard(static.Scope()):
        executor.run(startup)
        if start_other is not None:
            executor.run(start_other)
        first = beginning(main)
        put(first)
        if case == "apart" and rank:
            put({name: array + 1 for name, array in first.items()})
        for update in range(UPDATES):
            for run in data(update):
                # Paddle itself would prune merged updates.
                pruned = {"use_prune": case == "rate"}
                executor.run(main, feed=run[rank], fetch_list=[loss], **pruned)
                if other is not None:
                    executor.run(other, feed=run[rank])
                schedule(method)
        made = values(main)
        if case == "resumed":
            # Built again, the program finds all its variables in the checkpoint.
            static.save(main, f"saved.{rank}/it")
            static.load(program(case, is_shared=True)[0], f"saved.{rank}/it", executor)
    after = {name: number - before.get(name, 0) for name, number in calls.items()}
    plain, startup, loss, method = program(case, is_shared=False)
    with static.scope_guard(static.Scope()):
        executor.run(startup)
        put(beginning(plain))
        for update in range(UPDATES):
            if case in BY_HAND:
                descend(plain, update, clips=case == "clip")
            else:
                executor.run(plain, feed=whole(update), fetch_list=[loss])
                schedule(method)
        right = values(plain)
    if not set(made) <= set(right):
        raise LookupError(f"{sorted(made)} are not in {sorted(right)}")
    return {
        **count(main),
        "calls": after,
        "moved": max(float(np.abs(made[name] - first[name]).max()) for name in made),
        "off": max(float(np.abs(made[name] - right[name]).max()) for name in made),
        "weights": [array.tolist() for array in made.values()],
    }


report: dict[str, Any] = {}
executor = static.Executor()
for case in wanted["cases"]:
    if case == "resnet18":
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup):
            x = static.data("i", [None, 3, 32, 32])
            y = static.data("l", [None], "int64")
            loss = nn.functional.cross_entropy(paddle.vision.models.resnet18()(x), y)
            fleet.distributed_optimizer(paddle.optimizer.Momentum()).minimize(loss, startup)
        report[case] = count(main)
        continue
    try:
        report[case] = train(case)
    except (RuntimeError, TypeError) as error:
        report[case] = {"error": str(error)}
Path(f"made.{rank}.json").write_text(json.dumps(report), encoding="utf-8")
