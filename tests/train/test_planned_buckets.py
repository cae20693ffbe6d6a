"""Buckets planned by a real training: equal on all ranks, with the weights of one process."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, evidence, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train


@pytest.mark.parametrize("version", ["3.3.1", pytest.param("2.6.2", marks=pytest.mark.long)])
def test_planned_buckets_are_those_that_are_reduced_and_train_as_one_process(
    version: str, tmp_path: Path
) -> None:
    asked = {"fuse_grad_size_in_MB": "plan"}
    ranks = train(PYTHONS[version], "planned.py", tmp_path / "run", asked)
    for report in ranks:
        assert report["weights"] == pytest.approx(report["alone"], abs=2e-6)
        assert report["weights"] == ranks[0]["weights"]
        assert report["made"] == ranks[0]["made"]
    proofs = [evidence(tmp_path / "run", rank) for rank in (0, 1)]
    for proof in proofs:
        (knob,) = [row for row in proof["knobs"] if row["name"] == "fuse_grad_size_in_MB"]
        # The plan, and so the status, depends on measured times.
        is_moot = proof["counts"]["allreduces"] == proof["counts"]["allreduces_before"] == 1
        assert knob["status"] == ("no_difference" if is_moot else "effective")
        assert re.search(
            r"planned \d+ buckets?: \S+ ms predicted.*; an allreduce costs \S+ ms", knob["reason"]
        ), knob
        assert proof["counts"]["allreduces"] == ranks[0]["made"][-1]
    assert proofs[0]["counts"]["bucket_bytes"] == proofs[1]["counts"]["bucket_bytes"]
    assert sum(proofs[0]["counts"]["bucket_bytes"]) == 6 * (64 * 64 + 64) * 4
