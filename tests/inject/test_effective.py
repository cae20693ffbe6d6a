"""What the proof says before anything was trained."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fleetrun.inject.evidence import EFFECTIVE, REFUSED, Evidence
from fleetrun.inject.spec import StrategySpec

if TYPE_CHECKING:
    from pathlib import Path

SPEC = StrategySpec({"nccl_comm_num": 2, "dgc": True}, {}, {})


def test_nothing_is_effective_before_an_update_was_counted(tmp_path: Path) -> None:
    path = tmp_path / "strategy.0.json"
    proof = Evidence(str(path), SPEC)
    proof.knob("nccl_comm_num", EFFECTIVE, in_effect=2, evidence="2 communicators in turn")
    proof.knob("dgc", REFUSED, reason="no")
    proof.write()
    early = json.loads(path.read_text())
    assert early["complete"] is False
    counted, refused = early["knobs"]
    assert (counted["status"], counted["in_effect"]) == ("no_effect", None)
    assert counted["reason"] == "no update of the optimizer was made"
    assert counted["evidence"] == "2 communicators in turn"
    assert refused["status"] == "refused"

    proof.updates = 1
    assert proof.claim()
    proof.write()
    late: dict[str, Any] = json.loads(path.read_text())
    assert late["complete"] is True
    assert late["knobs"][0]["status"] == "effective"
    assert late["knobs"][0]["in_effect"] == 2
    assert late["knobs"][0]["reason"] == ""
