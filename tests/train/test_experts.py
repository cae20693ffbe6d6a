"""Paddle's layer of experts (MoELayer), spread over the ranks, against one process.

Paddle's builds for CPUs have no kernels for it; the device under test carries it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
from training import PYTHONS, evidence, train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train

UPDATES = 4
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
SMALL = {"fuse_grad_size_in_num": 3, "nccl_comm_num": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "ep": {"ep": 2, "main_grad": True},
    "ep x mp": {"ep": 2, "mp": 2, "main_grad": True},
    "ep along mp": {"ep": 4, "mp": 2, "main_grad": True},
}
STRATEGIES: dict[str, dict[str, Any]] = {"checked": {}, "small": SMALL, "merged": MERGED}
SHORT = ("ep", 4, "small")


def _cases() -> list[Any]:
    return [
        pytest.param(*case, marks=() if case == SHORT else pytest.mark.long)
        for name in LAYOUTS
        for nranks in (2, 4)
        if nranks > LAYOUTS[name].get("mp", 1)
        for strategy in STRATEGIES
        # The layouts with `ep` have sharding, which is not merged.
        if name == "dp" or strategy != "merged"
        for case in [(name, nranks, strategy)]
    ]


@pytest.mark.parametrize(("name", "nranks", "strategy"), _cases())
def test_experts_train_as_in_one_process(
    name: str, nranks: int, strategy: str, tmp_path: Path
) -> None:
    layout = {**LAYOUTS[name], "merge": 2 if strategy == "merged" else 1}
    alone, *ranks = trained(layout, nranks, STRATEGIES[strategy], tmp_path)
    for report in ranks:
        for key, value in report["weights"].items():
            parts = key.split(".")
            if "experts" in parts:
                at = parts.index("experts") + 1
                parts[at] = str(int(parts[at]) + report["first"])
            whole = np.array(alone["weights"][".".join(parts)])
            assert float(abs(np.array(value) - whole).max()) < 2e-6, key
        assert report["updates"] == UPDATES
        # Except for rounding along mp.
        assert {*map(remark, report["notes"])} - {"the"} == set()
    proofs = [evidence(tmp_path / "ours", rank) for rank in range(nranks)]
    assert [proof["ranks_equal"] for proof in proofs] == [True] * nranks
    fields = [(field["status"], field["evidence"]) for proof in proofs for field in proof["fields"]]
    if strategy == "merged":
        assert {status for status, _ in fields} == {"effective"}, fields


@pytest.mark.parametrize(
    ("name", "nranks", "spoilt", "differ"),
    [
        ("dp", 2, "1:1.gate.gate.weight", "rank 1 and rank 0 differ"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("ep x mp", 4, "3:1.gate.gate.weight", "rank 3 (mp 1, moe_sharding 1) differs"),
                ("ep", 2, "1:1.experts.0.up.weight", ""),
            ]
        ),
    ],
)
def test_what_all_ranks_hold_beside_experts_is_compared(
    name: str, nranks: int, spoilt: str, differ: str, tmp_path: Path
) -> None:
    _, *ranks = trained(LAYOUTS[name], nranks, {}, tmp_path, spoilt)
    notes = {note for report in ranks for note in report["notes"] if remark(note) == "after"}
    assert len(notes) == bool(differ), notes
    assert all(f"after update 2 {differ}" in note for note in notes), notes
    assert all(f"{spoilt.partition(':')[2]} of shape" in note for note in notes), notes


def trained(
    layout: dict[str, Any], nranks: int, asked: dict[str, Any], folder: Path, spoilt: str = ""
) -> list[Any]:
    """Return what the process alone reports, and each of NRANKS ranks with the strategy ASKED."""
    python, more = PYTHONS["3.3.1"], {"LAYOUT": json.dumps(layout), "SPOIL": spoilt}
    with devices.on("npu"):
        alone = train(python, "experts.py", folder / "alone", None, nranks=1, more=more)
        return alone + train(
            *(python, "experts.py", folder / "ours", asked),
            nranks=nranks,
            more=more,
            check_ranks="auto",
        )


def remark(note: str) -> str:
    return note.partition(" ")[0]
