"""Strategies with scripts that have settings of their own, on two CPU ranks of real Paddle."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from training import PYTHONS, evidence, run, told

from fleetrun.rundir import heartbeat, rankfile

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.train

TOPOLOGY = {"nranks": 2, "nnodes": 1, "ranks_per_node": 2}

# Each rank's evidence goes to its own file; this runs before Paddle is imported.
BEGIN = """
import os, sys
rank = int(os.environ["PADDLE_TRAINER_ID"])
os.environ["FLEETRUN_RECORDS"] = f"rank.{rank}.jsonl"
import paddle
from paddle.distributed import fleet
"""

OWN_SETTINGS = (
    BEGIN
    + """
with open(f"partial.{rank}", "w") as file:
    file.write("fuse_grad_size_in_num: 3 localsgd_configs { k_steps: 5 }")
strategy = fleet.DistributedStrategy()
strategy.fuse_grad_size_in_MB = 4
strategy.fuse_all_reduce_ops = False
strategy.fuse_grad_size_in_MB = 2.5             # of the wrong type: Paddle drops it
strategy.recompute_configs = {"checkpoints": ["mine"]}
strategy.load_from_prototxt(f"partial.{rank}")
build = paddle.static.BuildStrategy()
build.fuse_bn_act_ops = True
strategy.build_strategy = build
fleet.init(is_collective=True, strategy=strategy)
final = fleet.fleet._user_defined_strategy
got = final.strategy.build_strategy
print("\\nFINAL", final.fuse_grad_size_in_MB, final.recompute_configs["checkpoints"],
      final.gradient_merge_configs["k_steps"], got.fuse_elewise_add_act_ops, got.fuse_bn_act_ops,
      got.fuse_relu_depthwise_conv, final.find_unused_parameters)
from paddle.distributed.fleet.base import distributed_strategy
paddle.seed(rank + 1)

class Small(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.used, self.frozen = paddle.nn.Linear(4, 3), paddle.nn.Linear(3, 3)
        self.frozen.weight.stop_gradient = True
        self.norm = paddle.nn.BatchNorm1D(3)

    def forward(self, x):
        return self.norm(self.frozen(self.used(x)))

class Mine(paddle.optimizer.SGD):
    def step(self):
        super().step()

model = Small()
optimizer = Mine(0.1, parameters=model.parameters())
model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
for index in range(9):
    loss = (model(paddle.randn([8, 4])) ** 2).mean() + index
    loss.backward()
    optimizer.step() if index % 2 else optimizer.minimize(loss)
    optimizer.clear_grad()
    print("\\nLOSS", index + 1, float(loss))
print("NEVER")
"""
)
ASKED = {
    "fuse_grad_size_in_MB": 16,
    "fuse_grad_size_in_num": 20,
    "find_unused_parameters": True,
    "gradient_merge_configs": {"k_steps": 4},
    "recompute_configs": {"checkpoints": ["a", "b"]},
    "amp": True,
    "amp_configs": {"init_loss_scaling": 8.0},
    "lars": True,
    "localsgd": False,
    "asp": True,
}
BUILD = {"fuse_elewise_add_act_ops": True, "fuse_relu_depthwise_conv": True}

DIVERGING = (
    BEGIN
    + """
strategy = fleet.DistributedStrategy()
strategy.fuse_grad_size_in_MB = 4
strategy.recompute_configs = {"checkpoints": ["mine"]}
fleet.init(is_collective=True)
optimizer = paddle.optimizer.AdamW(0.1, parameters=paddle.nn.Linear(2, 2).parameters())
model = paddle.DataParallel(paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 1)))
optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
alone = paddle.nn.Linear(2, 2)
if rank == 0:                                   # what one rank trains alone is its own affair
    own = paddle.optimizer.SGD(0.1, parameters=alone.parameters())
    alone(paddle.ones([1, 2])).mean().backward()
    own.step()
optimizer = fleet.distributed_optimizer(optimizer, strategy)
final = fleet.fleet._user_defined_strategy
print("\\nFINAL", final.fuse_grad_size_in_MB, final.recompute_configs["checkpoints"],
      strategy.fuse_grad_size_in_MB)
for index in range(4):
    model(paddle.ones([1, 2]) * (rank + 1)).mean().backward()
    if index == 0:                              # the last bit differs: that is rounding
        with paddle.no_grad():
            weight = model.parameters()[0]
            weight.set_value(weight * (1 + 6e-8 * rank))
    if index == 1 and rank == 1:
        with paddle.no_grad():
            weight = model.parameters()[2]
            weight.set_value(weight + 1e-4)
    optimizer.step()
    optimizer.clear_grad()
    print("\\nSTEP", index + 1, flush=True)
"""
)


def train(
    version: str, folder: Path, script: str, asked: dict[str, Any], *, ranks: int = 2, **env: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run SCRIPT on RANKS ranks with the strategy ASKED; return the end and the output of each."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    (folder / "strategy.json").write_text(
        json.dumps(told({"topology": TOPOLOGY, **asked})), encoding="utf-8"
    )
    env = {"FLEETRUN_STRATEGY_FILE": str(folder / "strategy.json"), **env}
    words = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    argv = ["-m", "fleetrun", f"--nproc_per_node={ranks}", *words, "train.py"]
    done = run(PYTHONS[version], argv, folder)
    logs = sorted(folder.glob("log/workerlog.*"))
    return done, [log.read_text(encoding="utf-8", errors="replace") for log in logs]


def proofs(folder: Path) -> list[dict[str, Any]]:
    return [evidence(folder, rank) for rank in range(len([*folder.glob("rank.*.jsonl")]))]


def fields(proof: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {field["name"]: field for field in proof["fields"]}


def test_the_scripts_own_settings_win_and_every_update_is_counted(tmp_path: Path) -> None:
    done, logs = train(
        "3.3.1",
        tmp_path,
        OWN_SETTINGS,
        {"strategy": ASKED, "build_strategy": BUILD},
        FLEETRUN_STOP_AFTER="4",
        FLEETRUN_HEARTBEAT=str(tmp_path / "beat"),
    )
    assert done.returncode == 0, done.stdout + "".join(logs)
    proof, other = proofs(tmp_path)
    assert "FINAL 4 ['mine'] 4 True True True True" in logs[0]
    assert proof["graph"] == "dygraph"
    assert proof["ranks_equal"] is other["ranks_equal"] is True
    assert proof["counts"]["parameters_compared"] == 5

    verdicts = fields(proof)
    assert set(verdicts) == {*ASKED, *BUILD}, "everything that was asked for is answered"
    own = {name for name, field in verdicts.items() if field["status"] == "script"}
    assert own == {
        "fuse_grad_size_in_MB",
        "fuse_grad_size_in_num",
        "recompute_configs",
    }
    assert {entry["name"]: entry["used"] for entry in proof["disagreements"]} == {
        "fuse_grad_size_in_MB": 4,
        "fuse_grad_size_in_num": 3,
        "recompute_configs": {"checkpoints": ["mine"]},
    }
    assert verdicts["fuse_grad_size_in_MB"]["in_effect"] == 4
    assert verdicts["asp"]["status"] == "refused"
    assert verdicts["find_unused_parameters"]["status"] == "effective"
    assert verdicts["localsgd"]["status"] == "no_difference"
    assert verdicts["lars"]["status"] == verdicts["amp_configs"]["status"] == "no_effect"
    assert "auto_cast" in verdicts["amp"]["reason"]
    assert "dygraph" in verdicts["fuse_elewise_add_act_ops"]["reason"]

    # A subclass's step that calls its base's, and minimize, count once; the fourth update stops.
    assert proof["updates"] == other["updates"] == 4
    for rank, log in enumerate(logs):
        printed = [float(loss) for loss in re.findall(r"^LOSS \d+ ([\d.]+)$", log, re.MULTILINE)]
        assert len(printed) == 3
        made = [*rankfile.updates(str(tmp_path / f"rank.{rank}.jsonl"))]
        assert [update.number for update in made] == [1, 2, 3, 4]
        assert [update.loss for update in made][:3] == pytest.approx(printed)
        assert [update.at for update in made] == sorted(update.at for update in made)
    # The last heartbeat is written at exit.
    assert heartbeat.last_step([str(tmp_path / "beat")]) == 4


def test_the_strategy_wins_on_request_and_ranks_that_diverge_are_stopped(tmp_path: Path) -> None:
    asked = {"fuse_grad_size_in_MB": 16, "recompute_configs": {"checkpoints": ["a", "b"]}}
    done, logs = train(
        "3.3.1",
        tmp_path,
        DIVERGING,
        {"strategy": asked, "mode": "override", "check_ranks": 2},
    )
    assert done.returncode != 0
    assert "FINAL 16 ['a', 'b'] 4" in logs[0], "\n".join(logs)
    # The launcher stops the others as soon as one has reported it.
    proof = next(proof for proof in proofs(tmp_path) if proof["ranks_equal"] is False)
    assert [(row["name"], row["script"], row["used"]) for row in proof["disagreements"]] == [
        ("fuse_grad_size_in_MB", 4, 16),
        ("recompute_configs", {"checkpoints": ["mine"]}, {"checkpoints": ["a", "b"]}),
    ]
    both = "".join(logs)
    assert "after update 2 rank 1 and rank 0 differ in the parameter 1.weight" in both
    assert "STEP 1" in both
    assert "STEP 2" not in both


SPAWNED = (
    BEGIN
    + """
def learn():
    paddle.distributed.init_parallel_env()
    model = paddle.DataParallel(paddle.nn.Linear(4, 2))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for _ in range(2):
        model(paddle.ones([2, 4]) * (1 + paddle.distributed.get_rank())).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    total = sum(float(parameter.sum()) for parameter in model.parameters())
    # With what stands around it, a line of one process is not torn by the other's.
    sys.stdout.write(f"\\nTOTAL {total:.6f} of {paddle.distributed.get_world_size()}\\n")

if __name__ == "__main__":
    paddle.distributed.spawn(learn, nprocs=2)
"""
)


def test_processes_that_the_script_spawns_train_with_the_strategy(tmp_path: Path) -> None:
    asked = {"strategy": {"fuse_all_reduce_ops": False}}
    done, (log,) = train("3.3.1", tmp_path, SPAWNED, asked, ranks=1)
    assert done.returncode == 0, done.stdout
    totals = re.findall(r"TOTAL (\S+) of 2", log)
    assert len(totals) == 2
    assert len(set(totals)) == 1
    (proof,) = proofs(tmp_path)
    assert fields(proof)["fuse_all_reduce_ops"]["status"] == "effective"
    assert proof["counts"]["allreduces"] == 2
    assert proof["counts"]["ranks_compared"] == 2
