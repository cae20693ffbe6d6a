"""Our code does not wait for the device in each step, and skips what has no kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# Ranks are compared after updates 1, 2, 4, ...
COMPARED = (1, 2, 3, 4, 8)


def test_no_tensor_is_read_on_the_host_in_each_step(tmp_path: Path) -> None:
    fused = {"fuse_grad_size_in_num": 2, "nccl_comm_num": 2}
    for reads in train(PYTHONS["3.3.1"], "host_reads.py", tmp_path / "ours", fused):
        # Reads in these steps show that the counter works.
        assert any(reads[step - 1] for step in COMPARED)
        others = [
            step_reads for number, step_reads in enumerate(reads, 1) if number not in COMPARED
        ]
        assert not any(others), others
