"""Builds static programs under one strategy after another, and reports what they contain.

Each is built in a forked child, which inherits the imported Paddle; ranks are not connected, so
nothing runs.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(
    PADDLE_TRAINER_ID="0",
    PADDLE_TRAINERS_NUM="4",
    PADDLE_CURRENT_ENDPOINT="127.0.0.1:9",
    PADDLE_TRAINER_ENDPOINTS=",".join(f"127.0.0.1:{port}" for port in (9, 10, 11, 12)),
    FLAGS_enable_pir_api=os.environ.get("FLAGS_enable_pir_api", "0"),
)
import paddle

from fleetrun import inject
from fleetrun.inject import evidence, import_hooks, updates
from fleetrun.inject.spec import StrategySpec, Topology
from fleetrun.inject.static import counting, program_runs, rings
from fleetrun.inject.static.cpu import channels, gloo

static: Any = paddle.static


class Alone:
    """A communicator in a process without peers."""


def arm(scenario: dict[str, Any], folder: Path) -> tuple[StrategySpec, evidence.Evidence]:
    """Do as `inject.arm`, but connect no ranks."""
    spec = StrategySpec(
        scenario.get("strategy", {}),
        scenario.get("build_strategy", {}),
        {},
        check_ranks=-1,
        topology=Topology(4, 2, 2),
    )
    proof = evidence.Evidence(str(folder / "proof"), spec)
    proof.count_updates = lambda: 1

    def fail(text: str, _: str) -> None:
        raise SystemExit(text)

    import_hooks.on_failure(fail)
    gloo._communicator = lambda *_: Alone()
    channels._connect = lambda *_: Alone()
    if scenario.get("gpu"):
        # Only programs are built: nothing connects, and nothing runs.
        gloo.is_used = lambda: False
        rings._open = lambda *_: None
    inject._install_all(spec, proof)
    return spec, proof


def count(main: Any) -> dict[str, Any]:
    """Count the operators in the blocks of MAIN."""
    blocks: list[dict[str, int]] = []
    for block in main.blocks:
        blocks.append({})
        for op in block.ops:
            blocks[-1][op.type] = blocks[-1].get(op.type, 0) + 1
    ops = main.global_block().ops
    return {
        "blocks": blocks,
        "depends": [
            [op.input(entry)[0] for entry in ("X", "Dep")] for op in ops if op.type == "depend"
        ],
        "summed": [op.input_arg_names[0] for op in ops if op.type == "all_reduce"],
        "order": [[op.type for op in block.ops] for block in main.blocks],
    }


def network() -> Any:
    """Build three layers; return the loss."""
    nn = paddle.nn
    x, y = static.data("x", [None, 8]), static.data("y", [None, 1])
    for width in (8, 8, 1):
        x = nn.Linear(8, width)(x)
        if width == 8:
            x = nn.functional.relu(x)
    return paddle.mean(nn.functional.square_error_cost(x, y))


def optimizer(kind: str) -> Any:
    """Make an optimizer of KIND."""
    if kind == "scheduled":
        return paddle.optimizer.SGD(paddle.optimizer.lr.ExponentialDecay(1.0, 0.5))
    return getattr(paddle.optimizer, kind)(0.1)


def build(scenario: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build the program of SCENARIO; return its content and its evidence."""
    fleet: Any = paddle.distributed.fleet
    spec, proof = arm(scenario, folder)
    paddle.enable_static()
    main, startup = static.Program(), static.Program()
    try:
        fleet.init(is_collective=True)
        with static.program_guard(main, startup):
            loss = network()
            method = optimizer(scenario.get("optimizer", "SGD"))
            other = paddle.mean(loss) if scenario.get("twice") else None
            fleet.distributed_optimizer(method).minimize(loss, startup)
            if other is not None:
                fleet.distributed_optimizer(optimizer("SGD")).minimize(other, startup)
        counting.report(main, main, spec, proof)
        rates = run(proof, main, method, scenario)
        if not rates:
            updates.record(main)
    except Exception as error:  # the test reads it
        return {"error": f"{type(error).__name__}: {error}", **proof._record()}
    return {"error": "", "rates": rates, **count(main), **proof._record()}


def run(proof: evidence.Evidence, main: Any, method: Any, scenario: dict[str, Any]) -> list[float]:
    """Pretend that MAIN has run as often as SCENARIO says; return the learning rates."""
    rates = []
    for step in range(scenario.get("runs", 0)):
        rates.append(method.get_lr())
        program_runs.count(main)
        if (step + 1) % scenario.get("schedule_every", 1) == 0:
            method._learning_rate.step()
    proof.note_dropped(program_runs.dropped())
    return rates


def build_apart(scenario: dict[str, Any]) -> dict[str, Any]:
    """Build SCENARIO in a child."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = os.fork()
        if not child:
            (folder / "report").write_text(json.dumps(build(scenario, folder), default=str))
            os._exit(0)
        os.waitpid(child, 0)
        report: dict[str, Any] = json.loads((folder / "report").read_text())
        return report


if __name__ == "__main__":
    reports = {name: build_apart(scenario) for name, scenario in json.load(sys.stdin).items()}
    print("FOUND" + json.dumps(reports))
