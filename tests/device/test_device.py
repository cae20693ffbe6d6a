"""The device under test by itself: Paddle computes on it, and its ranks communicate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import pytest
from training import mostly, run_program

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

# Every operation is late by a random time.
LATE = {"kernel_us": 500, "delay_us": 3000}


def reports(
    folder: Path, program: str, nranks: int, version: str = "3.3.1", **more: str
) -> list[Any]:
    """Return the reports of NRANKS ranks of PROGRAM, all of which succeed."""
    codes, outputs, reported = run_program(folder, program, nranks, version, **more)
    assert codes == [0] * nranks, outputs
    return reported


@pytest.mark.parametrize("version", mostly("3.3.1"))
def test_collectives_of_three_late_ranks_are_right_and_witnessed(
    version: str, tmp_path: Path
) -> None:
    with devices.on("mlu", **LATE, witness=tmp_path):
        ranks = reports(tmp_path, "collectives", 3, version)
    for rank, results in enumerate(ranks):
        assert results["place"] == f"Place(mlu:{rank})"
        assert results["sum"] == [6, 9]
        assert results["max"] == [3, 4]
        assert results["min"] == [1, 2]
        assert results["product"] == [6, 24]
        assert results["broadcast"] == [2, 3]
        assert results["reduce"] == ([6, 9] if rank == 1 else None)
        assert results["all_gather"] == [[1, 2], [2, 3], [3, 4]]
        assert results["reduce_scatter"] == [6 * (rank + 1), 9 * (rank + 1)]
        assert results["all_to_all"] == [[n * (rank + 1), (n + 1) * (rank + 1)] for n in (1, 2, 3)]
        assert results["ring"] == [(rank - 1) % 3 + 1, (rank - 1) % 3 + 2]
        assert results["objects"] == [{"rank": number} for number in range(3)]
        assert results["halves"] == [6, 9]
        seen = devices.witnessed(tmp_path, rank)
        assert [call.order for call in seen] == list(range(1, len(seen) + 1))
        assert [(call.operation, call.bytes) for call in seen][:9] == [
            *[("all_reduce", 8)] * 4,
            *(("broadcast", 8), ("reduce", 8), ("all_gather", 8)),
            *(("reduce_scatter", 24), ("all_to_all", 24)),
        ]
        assert {"send", "recv"} <= {call.operation for call in seen}
        assert all(call.issued <= call.begin <= call.end for call in seen)
        assert {(call.rank, call.ranks) for call in seen} == {(rank, 3)}


def test_who_does_not_wait_for_a_collective_misses_it(tmp_path: Path) -> None:
    # The first sum begins late. To free memory must not wait for the others, as a rank does.
    with devices.on("npu", delay_us=200_000, free="early"):
        ranks = reports(tmp_path, "unordered", 2)
    assert [report["waited"] for report in ranks] == [4, 4]
    assert [report["not waited"] for report in ranks] == [2, 3]
