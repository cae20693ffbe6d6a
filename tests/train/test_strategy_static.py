"""Static graphs under a strategy: two real ranks over gloo, and what their programs hold."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.train

ROOT = Path(__file__).parents[2]
PYTHONS = {
    "3.3.1": Path(sys.executable),
    "2.6.2": Path(
        os.environ.get("FLEETRUN_TEST_PADDLE26", ROOT / ".venv-paddle2.6" / "bin" / "python")
    ),
}
MEBIBYTE = 2**20
# It knows nothing of the strategy. What it finds in its programs, it counts by itself.
SCRIPT = """
import json, os, sys

rank = os.environ["PADDLE_TRAINER_ID"]
os.environ["FLEETRUN_STRATEGY_EVIDENCE"] = f"proof.{rank}.json"
os.environ["FLAGS_enable_pir_api"] = "0"
import numpy as np, paddle
from paddle import nn
from paddle.distributed import fleet

steps, batch, big = map(int, sys.argv[1:])
paddle.enable_static()
fleet.init(is_collective=True)
paddle.seed(5)
kinds = {
    "sgd": paddle.optimizer.SGD,
    "momentum": paddle.optimizer.Momentum,
    "adam": paddle.optimizer.Adam,
}

def mlp(kind):
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        x, y = paddle.static.data("x", [None, 8]), paddle.static.data("y", [None, 1])
        hidden = x
        for _ in range(3):
            hidden = nn.functional.relu(nn.Linear(8, 8)(hidden))
        loss = paddle.mean(nn.functional.square_error_cost(nn.Linear(8, 1)(hidden), y))
        fleet.distributed_optimizer(kinds[kind](learning_rate=0.05)).minimize(loss, startup)
    return main, startup, loss

def count(main):
    ops, inside, sizes = {}, {}, []
    for block in main.blocks:
        for op in block.ops:
            ops[op.type] = ops.get(op.type, 0) + 1
            if op.type == "coalesce_tensor":
                inside[op.output("FusedOutput")[0]] = op.input("Input")
            elif op.type in ("c_allreduce_sum", "all_reduce"):
                name = op.input_arg_names[0]
                sizes.append([
                    4 * int(np.prod(block._find_var_recursive(each).shape))
                    for each in inside.get(name, [name])
                ])
    return {"ops": ops, "blocks": [len(block.ops) for block in main.blocks], "sizes": sizes}

made = {}
random = np.random.RandomState(3)
images = random.randn(96, 8).astype("float32")
wanted = images.sum(1, keepdims=True) * 0.3
executor = paddle.static.Executor()
for kind in kinds:
    main, startup, loss = mlp(kind)
    executor.run(startup)
    for step in range(steps):
        at = step * batch * 2 + int(rank) * batch
        feed = {"x": images[at : at + batch], "y": wanted[at : at + batch]}
        executor.run(main, feed=feed, fetch_list=[loss])
    made[kind] = count(main)
    made[kind]["weights"] = [
        np.array(paddle.static.global_scope().find_var(each.name).get_tensor()).tolist()
        for each in main.all_parameters()
    ]
if big:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        x, y = paddle.static.data("i", [None, 3, 32, 32]), paddle.static.data("l", [None], "int64")
        loss = nn.functional.cross_entropy(paddle.vision.models.resnet50()(x), y)
        fleet.distributed_optimizer(kinds["momentum"]()).minimize(loss, startup)
    made["resnet50"] = count(main)
with open(f"made.{rank}.json", "w") as file:
    json.dump(made, file)
"""


class Trained:
    """What two ranks found in their programs, and what fleetrun says of them."""

    def __init__(self, folder: Path) -> None:
        self.ranks: list[dict[str, Any]] = [
            json.loads((folder / f"made.{rank}.json").read_text()) for rank in (0, 1)
        ]
        self.proofs: list[dict[str, Any]] = [
            json.loads((folder / f"proof.{rank}.json").read_text()) for rank in (0, 1)
        ]

    def knob(self, name: str) -> dict[str, Any]:
        """Find what is said of the field NAME."""
        (found,) = [each for each in self.proofs[0]["knobs"] if each["name"] == name]
        return dict(found)


def train(
    python: Path,
    folder: Path,
    *numbers: int,
    strategy: dict[str, Any],
    build_strategy: dict[str, Any] | None = None,
) -> Trained:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    wish = {
        "schema": 1,
        "strategy": strategy,
        "build_strategy": build_strategy or {},
        "topology": {"nranks": 2, "nnodes": 1, "ranks_per_node": 2},
    }
    (folder / "strategy.json").write_text(json.dumps(wish), encoding="utf-8")
    run = subprocess.run(
        [
            python,
            *("-m", "fleetrun", "--nproc_per_node=2"),
            f"--env=FLEETRUN_STRATEGY_FILE={folder / 'strategy.json'}",
            "train.py",
            *map(str, numbers),
        ],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return Trained(folder)


def distance(one: Any, other: Any) -> float:  # noqa: ANN401 - lists of lists, or numbers
    if isinstance(one, list):
        assert len(one) == len(other)
        return max(map(distance, one, other))
    return float(abs(one - other))


@pytest.fixture(params=["3.3.1", "2.6.2"])
def python(request: pytest.FixtureRequest) -> Path:
    python = PYTHONS[request.param]
    if not python.exists():
        reason = f"{python} is not there: scripts/test sets it up"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return python


def test_packed_and_merged_programs_learn_what_plain_ones_learn(
    python: Path, tmp_path: Path
) -> None:
    plain = train(python, tmp_path / "plain", 2, 16, 0, strategy={"fuse_all_reduce_ops": False})
    packed = train(
        python,
        tmp_path / "packed",
        *(2, 16, 1),
        strategy={"fuse_grad_size_in_MB": 4, "nccl_comm_num": 2},
        build_strategy={
            "fuse_all_optimizer_ops": True,
            "fuse_elewise_add_act_ops": True,
            "fuse_gemm_epilogue": True,
        },
    )
    merged = train(
        python,
        tmp_path / "merged",
        *(4, 8, 0),
        strategy={
            "gradient_merge": True,
            "gradient_merge_configs": {"k_steps": 2, "avg": True},
            "fuse_grad_size_in_num": 3,
        },
        build_strategy={"fuse_all_optimizer_ops": True},
    )

    for kind in ("sgd", "momentum", "adam"):
        reference = plain.ranks[0][kind]
        assert [len(bucket) for bucket in reference["sizes"]] == [1] * 8
        for trained in (plain, packed, merged):
            first, second = trained.ranks
            assert first[kind]["weights"] == second[kind]["weights"]
            assert distance(first[kind]["weights"], reference["weights"]) < 1e-6
        assert [len(bucket) for bucket in packed.ranks[0][kind]["sizes"]] == [8]
        assert packed.ranks[0][kind]["ops"]["fused_elemwise_add_activation"] == 3
        assert [len(bucket) for bucket in merged.ranks[0][kind]["sizes"]] == [3, 3, 2]
        assert merged.ranks[0][kind]["ops"]["conditional_block"] == 1
        if kind != "sgd":
            for trained in (packed, merged):
                ops = trained.ranks[0][kind]["ops"]
                assert ops[f"merged_{kind}"] == 1
                assert kind not in ops
    # 161 gradients: no bucket is above the limit unless one gradient is, and none is too small.
    buckets = packed.ranks[0]["resnet50"]["sizes"]
    assert sum(map(len, buckets)) == 161
    assert all(sum(bucket) <= 4 * MEBIBYTE or len(bucket) == 1 for bucket in buckets)
    assert all(
        sum(bucket) + following[0] > 4 * MEBIBYTE
        for bucket, following in itertools.pairwise(buckets)
    )
    assert packed.ranks[0]["resnet50"]["ops"]["merged_momentum"] == 1
    for trained, updates in ((plain, 6), (packed, 6), (merged, 6)):
        for proof in trained.proofs:
            assert proof["graph"] == "static"
            assert proof["complete"]
            assert proof["ranks_equal"]
            assert proof["updates"] == updates
    assert plain.knob("fuse_all_reduce_ops")["status"] == "effective"
    assert packed.knob("fuse_grad_size_in_MB")["status"] == "effective"
    assert packed.knob("fuse_elewise_add_act_ops")["status"] == "effective"
    assert packed.knob("fuse_gemm_epilogue")["status"] == "no_effect"
    assert packed.knob("nccl_comm_num")["status"] == "no_effect"
    assert merged.knob("gradient_merge")["status"] == "effective"
