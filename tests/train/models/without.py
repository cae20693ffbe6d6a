"""Trains dynamic and static graphs while Paddle lacks one private name after another.

Forked children, which inherit the imported Paddle, train each case. Reads a list of cases, writes
the result of each; a case that fails is also tried without fleetrun.
"""

import atexit
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleetrun import inject
from fleetrun.inject import evidence
from fleetrun.inject.paddle_api.private_names import NAMES
from fleetrun.inject.spec import StrategySpec, Topology
from fleetrun.rundir import rankfile

fleet: Any = paddle.distributed.fleet
MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}}
BUCKETS = {"fuse_grad_size_in_num": 2, "nccl_comm_num": 2, "fuse_grad_size_in_MB": 1}
STEPS = 4
# The cases that train at the same time.
AT_ONCE = 6


def owner_of(name: Any) -> tuple[Any, str]:
    """Return the object that has the private NAME, and the name's last part."""
    owner: Any = sys.modules[name.module]
    *path, last = name.path.split(".")
    for part in path:
        owner = getattr(owner, part)
    kinds = owner.__mro__ if isinstance(owner, type) else [owner]
    return next(kind for kind in kinds if last in vars(kind)), last


def spoil(case: dict[str, Any]) -> None:
    """Remove the name of CASE from Paddle."""
    if case["name"] is not None:
        delattr(*owner_of(NAMES[case["name"]]))


def arm(folder: Path, ranks: int) -> None:
    """Apply all patches, as at the import of Paddle."""
    asked = {**MERGE, **BUCKETS} if ranks > 1 else MERGE
    builds = {"fuse_all_optimizer_ops": True, "fuse_elewise_add_act_ops": True}
    spec = StrategySpec(asked, builds, {}, topology=Topology(ranks, 1, ranks))
    proof = evidence.Evidence(str(folder / "proof"), spec)
    proof.write_at_exit()
    inject._install_all(spec, proof)


def dynamic(rank: int) -> list[float]:
    """Train a model with this RANK's data; return its weights."""
    strategy = fleet.DistributedStrategy()
    fleet.init(is_collective=True, strategy=strategy)
    nn = paddle.nn
    numbers = np.random.RandomState(rank)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    for index, parameter in enumerate(net.parameters()):
        parameter.set_value(np.random.RandomState(index).randn(*parameter.shape).astype("float32"))
    momentum = paddle.optimizer.Momentum(0.1, parameters=net.parameters())
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(momentum)
    for _ in range(STEPS):
        (model(paddle.to_tensor(numbers.randn(3, 4).astype("float32"))) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [float(value) for parameter in net.parameters() for value in parameter.numpy().ravel()]


def static(_rank: int) -> list[float]:
    """Train a static program; return the losses."""
    paddle.enable_static()
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    x = paddle.static.data("x", [None, 4])
    hidden = paddle.nn.functional.relu(paddle.nn.Linear(4, 6)(x))
    loss = paddle.mean(paddle.nn.Linear(6, 1)(hidden))
    fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1)).minimize(loss)
    executor = paddle.static.Executor()
    executor.run(paddle.static.default_startup_program())
    main: Any = paddle.static.default_main_program()
    for index, parameter in enumerate(
        sorted(main.all_parameters(), key=lambda parameter: str(parameter.name))
    ):
        tensor = paddle.static.global_scope().find_var(parameter.name).get_tensor()
        values = np.random.RandomState(index).randn(*parameter.shape).astype("float32")
        tensor.set(values, paddle.CPUPlace())
    feed = {"x": np.random.RandomState(3).randn(2, 4).astype("float32")}
    return [float(executor.run(feed=feed, fetch_list=[loss])[0]) for _ in range(STEPS)]


def wait_for(end: str) -> None:
    """Return once a server listens at END."""
    host, _, port = end.rpartition(":")
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.02)


def child(case: dict[str, Any], folder: Path, rank: int) -> int:
    """Begin to train CASE as RANK in a forked process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(case["environ"][rank])
        errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        if rank:
            # A client that comes before the store retries only after seconds.
            wait_for(case["environ"][rank]["PADDLE_MASTER"])
        spoil(case)
        if case["is_armed"]:
            arm(folder, len(case["environ"]))
        numbers = (static if case["is_static"] else dynamic)(rank)
        (folder / "numbers").write_text(json.dumps(numbers))
        atexit._run_exitfuncs()
        code = 0
    except BaseException:  # reported by the parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def begin(case: dict[str, Any], folder: Path) -> list[int]:
    """Begin to train CASE; return the ids of its ranks."""
    folders = [folder / str(rank) for rank in range(len(case["environ"]))]
    for rank_folder in folders:
        rank_folder.mkdir(parents=True)
    return [child(case, rank_folder, rank) for rank, rank_folder in enumerate(folders)]


def wait(pids: list[int]) -> list[int]:
    """Return how PIDS have ended; once one has failed, no other can go on without it."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            if any(codes.values()):
                os.kill(pid, signal.SIGKILL)
                codes[pid] = os.waitpid(pid, 0)[1]
            elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                codes[pid] = os.waitpid(pid, 0)[1]
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def end(pids: list[int], folder: Path) -> dict[str, Any]:
    """Wait for PIDS; return how they have ended, and what the ranks report."""
    codes = wait(pids)
    first = folder / "0"
    result: dict[str, Any] = {"codes": codes, "said": (first / "stderr").read_text()}
    if not any(codes):
        result["numbers"] = [
            json.loads((folder / str(rank) / "numbers").read_text()) for rank in range(len(pids))
        ]
    if (first / "proof").exists():
        result["proof"] = rankfile.last(str(first / "proof"), rankfile.STRATEGY, 0)
    return result


def run(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Train all CASES, some at a time: they mostly wait for connections."""
    results = []
    for start in range(0, len(cases), AT_ONCE):
        begun = [
            (folder / str(place), begin(case, folder / str(place)))
            for place, case in enumerate(cases[start : start + AT_ONCE], start)
        ]
        results += [end(pids, case_folder) for case_folder, pids in begun]
    return results


def main() -> None:
    """Run all cases of the first file named in argv; write results to the second."""
    source, target = map(Path, sys.argv[1:])
    cases = json.loads(source.read_text())
    # Else the collector of each child would copy the memory of all that Paddle has made.
    gc.collect()
    gc.freeze()
    results = run(cases, target.parent / "armed")
    failed = [place for place, result in enumerate(results) if any(result["codes"])]
    alone = run([{**cases[place], "is_armed": False} for place in failed], target.parent / "alone")
    for place, result in zip(failed, alone, strict=True):
        results[place]["alone"] = result["codes"]
    target.write_text(json.dumps(results))


main()
