"""The first process of a rank that trains claims its evidence; and that evidence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training import evidence
from waiting import until

from fleetrun.inject.evidence import EFFECTIVE, REFUSED, Evidence
from fleetrun.inject.spec import StrategySpec

NOTHING = StrategySpec({}, {}, {})
RECORDS = "rank.0.jsonl"


def record(path: Path, pid: int, *, complete: bool) -> None:
    evidence = {"schema": 1, "kind": "strategy", "restart": 0, "pid": pid, "complete": complete}
    with path.open("a") as file:
        print(json.dumps(evidence), file=file)


def test_another_process_of_the_rank_that_trains_keeps_its_claim(tmp_path: Path) -> None:
    path = tmp_path / RECORDS
    code = "import sys; sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        env={**os.environ, "FLEETRUN_RECORDS": str(path)},
    )
    # During exec a process seems to have no environment.
    until(lambda: bytes(path) in Path(f"/proc/{other.pid}/environ").read_bytes())
    for pid in (1, other.pid):
        record(path, pid, complete=True)
    late = Evidence(str(path), NOTHING)
    assert not late.claim()
    late.count_updates = lambda: 1
    late.write()
    assert evidence(tmp_path)["pid"] == other.pid
    # A process that only imported Paddle has no claim.
    path.unlink()
    record(path, other.pid, complete=False)
    assert Evidence(str(path), NOTHING).claim()
    other.communicate()


def test_the_claim_of_a_process_that_is_gone_ends(tmp_path: Path) -> None:
    # Another process has got the id.
    record(tmp_path / RECORDS, 1, complete=True)
    proof = Evidence(str(tmp_path / RECORDS), NOTHING)
    assert proof.claim()
    proof.write()
    assert evidence(tmp_path)["pid"] == os.getpid()


def test_a_forked_child_that_trains_writes_and_one_that_does_not_is_silent(
    tmp_path: Path,
) -> None:
    path = tmp_path / RECORDS
    code = f"""
import json, os, sys
from fleetrun.inject.evidence import Evidence
from fleetrun.inject.spec import StrategySpec
proof = Evidence({str(path)!r}, StrategySpec({{}}, {{}}, {{}}))
for trains in (False, True):
    child = os.fork()
    if not child:
        if trains:
            proof.count_updates = lambda: 1
            proof.claim()
        proof.write()
        os._exit(0)
    os.waitpid(child, 0)
    print(os.path.exists({str(path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_nothing_is_effective_before_an_update_was_counted(tmp_path: Path) -> None:
    spec = StrategySpec({"nccl_comm_num": 2, "dgc": True}, {}, {})
    proof = Evidence(str(tmp_path / RECORDS), spec)
    proof.field("nccl_comm_num", EFFECTIVE, in_effect=2, evidence="2 communicators in turn")
    proof.field("dgc", REFUSED, reason="no")
    proof.write()
    early = evidence(tmp_path)
    assert early["complete"] is False
    counted, refused = early["fields"]
    assert (counted["status"], counted["in_effect"]) == ("no_effect", None)
    assert counted["reason"] == "no update of the optimizer was made"
    assert counted["evidence"] == "2 communicators in turn"
    assert refused["status"] == "refused"

    proof.count_updates = lambda: 1
    assert proof.claim()
    proof.write()
    late: dict[str, Any] = evidence(tmp_path)
    assert late["complete"] is True
    assert late["fields"][0]["status"] == "effective"
    assert late["fields"][0]["in_effect"] == 2
    assert late["fields"][0]["reason"] == ""
