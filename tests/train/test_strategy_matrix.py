"""Every kind of model with every preset: the weights of one process.

Without --long, with `recommended` only, on the Paddle of which test_strategy_kinds leaves out more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import train_kinds
import yaml
from train_kinds import launch
from training import PYTHONS, ROOT, mostly

from fleetrun.strategy import load

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

PRESETS = {
    name: (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    for name in load.PRESETS
    # These are for static graphs, and for scripts that scale their loss.
    if name not in ("compute_fusion", "amp")
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


@pytest.fixture(scope="module", params=mostly("2.6.2"))
def python(request: pytest.FixtureRequest) -> Path:
    return PYTHONS[request.param]


@pytest.fixture(scope="module")
def alone(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train everything in one process, without a strategy."""
    words = ("--kinds=groups", f"--alone={','.join(train_kinds.names())}")
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
    if preset not in ("small buckets", "gradient_merge"):
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
