"""Which of a rank's processes writes the rank's proof: the first that trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from waiting import until

from fleetrun.inject.evidence import Evidence
from fleetrun.inject.spec import StrategySpec

NOTHING = StrategySpec({}, {}, {})


def record(path: Path, pid: int, *, complete: bool) -> None:
    path.write_text(json.dumps({"pid": pid, "complete": complete}))


def test_another_process_of_the_rank_that_trains_keeps_its_claim(tmp_path: Path) -> None:
    path = tmp_path / "strategy.0.json"
    code = "import sys; sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        env={**os.environ, "FLEETRUN_STRATEGY_EVIDENCE": str(path)},
    )
    try:
        # While it becomes another program it seems to have no environment.
        until(lambda: bytes(path) in Path(f"/proc/{other.pid}/environ").read_bytes())
        record(path, other.pid, complete=True)
        late = Evidence(str(path), NOTHING)
        assert not late.claim()
        late.updates = 1
        late.write()
        assert json.loads(path.read_text())["pid"] == other.pid
        # One that has only imported Paddle has no claim.
        record(path, other.pid, complete=False)
        assert Evidence(str(path), NOTHING).claim()
    finally:
        other.communicate()


def test_what_an_earlier_run_of_the_rank_has_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "strategy.0.json"
    # A process id of today that has nothing to do with the rank.
    record(path, 1, complete=True)
    proof = Evidence(str(path), NOTHING)
    assert proof.claim()
    proof.write()
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_who_does_not_train_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "strategy.0.json"
    proof = Evidence(str(path), NOTHING)
    proof.write()
    assert json.loads(path.read_text())["complete"] is False
    record(path, 4, complete=True)
    Evidence(str(path), NOTHING).write()
    assert json.loads(path.read_text())["pid"] == 4


def test_a_forked_child_that_trains_writes_and_one_that_does_not_is_silent(
    tmp_path: Path,
) -> None:
    path = tmp_path / "strategy.0.json"
    code = f"""
import json, os, sys
from fleetrun.inject.evidence import Evidence
from fleetrun.inject.spec import StrategySpec
proof = Evidence({str(path)!r}, StrategySpec({{}}, {{}}, {{}}))
for trains in (False, True):
    child = os.fork()
    if not child:
        if trains:
            proof.updates = 1
            proof.claim()
        proof.write()
        os._exit(0)
    os.waitpid(child, 0)
    print(os.path.exists({str(path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
