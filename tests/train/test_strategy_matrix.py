"""Every kind of model with every preset, and random models: the weights of one process.

Without --long, with `recommended` only, on the Paddle of which test_strategy_kinds leaves out more.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import devices
import pytest
import train_kinds
import yaml
from train_kinds import launch
from training import PYTHONS, ROOT, mostly

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# The number of random trainings per Paddle, and how many of them share a launch.
DRAWS, TOGETHER = int(os.environ.get("FLEETRUN_TEST_DRAWS", "40")), 20
PRESETS = {
    name: (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    for name in ("recommended", "comm_fusion", "overlap", "gradient_merge")
}
PRESETS["small buckets"] = yaml.safe_dump(
    {
        "strategy": {
            "fuse_grad_size_in_num": 2,
            "last_comm_group_size_MB": 0.0001,
            "nccl_comm_num": 2,
        },
        "build_strategy": {"fuse_all_optimizer_ops": True},
    }
)
# Plain models are left to Paddle's own reducer.
PRESETS["bytes alone"] = yaml.safe_dump(
    {"strategy": {"fuse_grad_size_in_MB": 1, "last_comm_group_size_MB": 0.0001}}
)
PRESETS["one gradient each"] = yaml.safe_dump({"strategy": {"fuse_all_reduce_ops": False}})


def drawn_strategy(seed: int) -> tuple[str, int]:
    """Return the YAML of the strategy that SEED draws, and the steps that it merges."""
    drawing = random.Random(seed)
    strategy: dict[str, Any] = {
        "fuse_all_reduce_ops": drawing.random() > 0.1,
        "nccl_comm_num": drawing.choice([1, 1, 2, 3]),
        "sync_nccl_allreduce": drawing.random() < 0.3,
    }
    choices: dict[str, list[Any]] = {
        "fuse_grad_size_in_MB": ["auto", 1, 32, None],
        "fuse_grad_size_in_num": [1, 2, 3, 5, None, None],
        "last_comm_group_size_MB": [0.0001, 0.001, None, None],
    }
    for name, values in choices.items():
        value = drawing.choice(values)
        if value is not None and strategy["fuse_all_reduce_ops"]:
            strategy[name] = value
    merges = 4 if drawing.random() < 0.25 else 1
    if merges > 1:
        strategy["gradient_merge"] = True
        strategy["gradient_merge_configs"] = {"k_steps": merges, "avg": True}
    build = {"fuse_all_optimizer_ops": drawing.random() < 0.3}
    return yaml.safe_dump({"strategy": strategy, "build_strategy": build}), merges


@pytest.fixture(scope="module", params=mostly("2.6.2"))
def python(request: pytest.FixtureRequest) -> Path:
    return PYTHONS[request.param]


@pytest.fixture(scope="module")
def alone(
    python: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[str, Any]:
    """Train everything in one process, without a strategy."""
    # What is drawn is skipped on devices: see conftest.py.
    draws = range(DRAWS if pytestconfig.getoption("--long") and not devices.kind() else 0)
    chosen = [*train_kinds.names(), *train_kinds.draws(draws)]
    words = ("--kinds=own", f"--alone={','.join(chosen)}")
    return launch(python, tmp_path_factory.mktemp("alone"), *words, nranks=1).reports[0]


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=() if name == "recommended" else pytest.mark.long)
        for name in PRESETS
    ],
)
def test_every_kind_with_every_preset_is_trained_as_by_one_process(
    python: Path, alone: dict[str, Any], preset: str, tmp_path: Path
) -> None:
    merges = preset == "gradient_merge"
    left_out = train_kinds.NOT_MERGED if merges else set()
    if train_kinds.is_paddles(yaml.safe_load(PRESETS[preset])):
        left_out = left_out | train_kinds.REFUSED_BY_PADDLE
    chosen = [name for name in train_kinds.names() if name not in left_out]
    ranks = launch(
        *(python, tmp_path, f"--kinds={','.join(chosen)}"),
        strategy=PRESETS[preset],
        accumulate=1 if merges else 4,
        is_strict=False,
    ).reports
    train_kinds.assert_as_alone(alone, ranks, chosen)


def test_outputs_that_are_used_in_part_are_refused_by_paddles_own_reducer(
    python: Path, tmp_path: Path
) -> None:
    done = launch(
        *(python, tmp_path, "--kinds=twofold"), strategy=PRESETS["recommended"], exit_code=1
    )
    assert "Please set find_unused_parameters=True" in done.output


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, DRAWS, TOGETHER))
def test_what_is_drawn_is_trained_as_by_one_process(
    python: Path, alone: dict[str, Any], first: int, tmp_path: Path
) -> None:
    chosen = train_kinds.draws(range(first, first + TOGETHER))
    strategy, merges = drawn_strategy(first)
    ranks = launch(
        *(python, tmp_path, f"--kinds={','.join(chosen)}"),
        strategy=strategy,
        accumulate=4 // merges,
        is_strict=False,
    ).reports
    train_kinds.assert_as_alone(alone, ranks, chosen)
