"""Errors on the device are detected: by the check, by the witness, or by wrong sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import devices
import pytest
from training import PYTHONS, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

PYTHON = PYTHONS["3.3.1"]
NOT_THE_AVERAGE = "did not return the average of the ranks' gradients"


def test_what_goes_wrong_in_training_is_noticed_by_the_checks_and_the_witness(
    tmp_path: Path,
) -> None:
    # What fleetrun's reducer averages, and Paddle's, which a script cannot spoil.
    ours = {"fuse_grad_size_in_num": 1, "nccl_comm_num": 2, "sync_nccl_allreduce": False}
    paddles = {"fuse_grad_size_in_num": 1}
    ways = {
        "right": "",
        "unwaited": NOT_THE_AVERAGE,
        "freed": NOT_THE_AVERAGE,
        "perturbed": "The ranks no longer train the same model",
        "swapped": NOT_THE_AVERAGE,
    }
    seen = {}
    for name, asked, part in (
        ("ours", ours, ["right", "unwaited", "freed", "perturbed"]),
        ("swapped", ours, ["swapped"]),
        ("paddles", paddles, ["right", "perturbed"]),
    ):
        witness = tmp_path / name
        witness.mkdir()
        with devices.on("npu", delay_us=50_000, free="early", witness=witness):
            ranks = train(
                *(PYTHON, "wrong_sums.py", tmp_path / f"trained-{name}", asked),
                check_ranks=1,
                # Otherwise Paddle's allocator keeps memory even after a collective has ended.
                more={
                    "WAYS": " ".join(part),
                    "FLAGS_use_stream_safe_cuda_allocator": "0",
                    "FLAGS_free_idle_chunk": "1",
                },
            )
        for rank in ranks:
            for way in part:
                stopped = rank.pop(way)
                assert bool(ways[way]) == bool(stopped), (name, way, stopped)
                assert ways[way] in stopped, (name, way, stopped)
        seen[name] = devices.traces(witness, 2)
    assert all(first == second for first, second in seen["ours"])
    assert all(first == second for first, second in seen["paddles"])
    assert not all(first == second for first, second in seen["swapped"])
