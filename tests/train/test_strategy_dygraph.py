"""Our reducer of gradients in real trainings of two ranks, against Paddle's own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.train

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parent / "models"
SITE = ROOT / "fleetrun" / "inject" / "site"
PYTHONS = {
    "3.3.1": Path(sys.executable),
    "2.6.2": Path(
        os.environ.get("FLEETRUN_TEST_PADDLE26", ROOT / ".venv-paddle2.6" / "bin" / "python")
    ),
}


def train(python: Path, model: str, folder: Path, strategy: dict[str, Any] | None) -> list[Any]:
    """Return what each of two ranks of MODEL reports; PYTHON runs them with STRATEGY."""
    folder.mkdir()
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    master, *ends = (f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)
    for probe in probes:
        probe.close()
    environ = {name: value for name, value in os.environ.items() if name[:9] != "FLEETRUN_"}
    environ |= {
        "PADDLE_MASTER": master,
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PYTHONPATH": str(SITE),
        "OMP_NUM_THREADS": "1",
        "OUTPUT": str(folder / "report"),
    }
    if strategy is not None:
        asked = {"strategy": strategy, "topology": {"nranks": 2, "ranks_per_node": 2}}
        (folder / "strategy.json").write_text(json.dumps(asked))
        environ["FLEETRUN_STRATEGY_FILE"] = str(folder / "strategy.json")
    ranks = [
        subprocess.Popen(
            [python, MODELS / model],
            env={
                **environ,
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_CURRENT_ENDPOINT": end,
                "FLEETRUN_STRATEGY_EVIDENCE": str(folder / f"strategy.{rank}.json"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, end in enumerate(ends)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=120)
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("version", PYTHONS)
def test_merged_micro_steps_equal_a_large_batch(version: str, tmp_path: Path) -> None:
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4, "avg": True}}
    large = train(PYTHONS[version], "merging.py", tmp_path / "large", None)
    first, second = train(PYTHONS[version], "merging.py", tmp_path / "merged", merge)
    for name, model in first.items():
        assert model["weights"] == second[name]["weights"]
        assert model["weights"] == pytest.approx(large[0][name]["weights"], abs=1e-6)
        assert model["rate"] == large[0][name]["rate"]
        assert model["allreduces"][3::4] == [2, 1, 1]
        assert sum(model["allreduces"]) == 4


@pytest.mark.parametrize("version", PYTHONS)
def test_buckets_give_the_weights_of_paddles_own_reducer(version: str, tmp_path: Path) -> None:
    fused = {"fuse_grad_size_in_num": 4, "nccl_comm_num": 2}
    plain = train(PYTHONS[version], "parts.py", tmp_path / "plain", None)
    ranks = train(PYTHONS[version], "parts.py", tmp_path / "fused", fused)
    for theirs, ours in zip(plain, ranks, strict=True):
        assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-6)
        assert ours["none"]
        # Twelve dense gradients, four in each.
        assert ours["allreduces"] == 3
    proof = json.loads((tmp_path / "fused" / "strategy.0.json").read_text())
    assert proof["counts"]["allreduces"] == 3
    assert {knob["status"] for knob in proof["knobs"]} == {"effective"}
