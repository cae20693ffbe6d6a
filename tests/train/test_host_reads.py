"""Our code does not wait for the device in each step, and skips what has no kernel."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from training import MODELS, PYTHONS, ROOT, run, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# Ranks are compared after updates 1, 2, 4, ...
COMPARED = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("version", PYTHONS)
def test_no_tensor_is_read_on_the_host_in_each_step(version: str, tmp_path: Path) -> None:
    fused = {"fuse_grad_size_in_num": 2, "nccl_comm_num": 2}
    for reads in train(PYTHONS[version], "host_reads.py", tmp_path / "ours", fused):
        # Reads in these steps show that the counter works.
        assert any(reads[step - 1] for step in COMPARED)
        others = [
            step_reads for number, step_reads in enumerate(reads, 1) if number not in COMPARED
        ]
        assert not any(others), others


@pytest.mark.parametrize("version", PYTHONS)
def test_updates_of_bfloat16_are_not_merged(version: str, tmp_path: Path) -> None:
    argv = [MODELS / "half_updates.py"]
    done = run(PYTHONS[version], argv, tmp_path, PYTHONPATH=str(ROOT))
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "float32": ["merged_momentum"],
        "bfloat16": ["momentum", "momentum"],
    }
