"""What the ranks' own writers leave is what the launcher's readers expect, name by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fleetrun
from fleetrun.inject import evidence as island
from fleetrun.inject import heartbeats
from fleetrun.inject.spec import StrategySpec
from fleetrun.postmortem import stacks
from fleetrun.records import names, strategyfiles, variables
from fleetrun.records.errorfile import ErrorReport, read_error
from fleetrun.records.heartbeat import is_scripts, read_step
from fleetrun.records.strategyfiles import FieldEvidence, GradientCounts, RankEvidence

SITE = Path(fleetrun.__file__).parent / "inject" / "site"


def run_rank(folder: Path, code: str) -> str:
    """Run CODE as rank 3 in its second attempt, with its error file in FOLDER."""
    env = {
        **os.environ,
        "PYTHONPATH": str(SITE),
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_RESTART_COUNT": "1",
        variables.ERROR_FILE: str(folder / names.error("3")),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    return done.stdout


def test_an_exception_fills_all_that_the_reader_knows(tmp_path: Path) -> None:
    run_rank(tmp_path, "raise ValueError('no')")
    said = read_error(str(tmp_path / names.error("3")))
    assert said is not None
    assert (said.rank, said.restart, said.kind, said.message) == (3, 1, "ValueError", "no")
    # `code` is of an exit only, `raw` of a broken file.
    known = said._replace(code=0, raw="x")
    assert all(value not in {None, ""} for value in known), known
    assert set(ErrorReport._fields) == set(said._asdict())


def test_an_exit_that_is_under_way_is_noted_where_the_launcher_looks(tmp_path: Path) -> None:
    note = names.exit_note(str(tmp_path / names.error("3")))
    code = f"""
import shutil, sys
try:
    sys.exit(7)
finally:
    shutil.copy({note!r}, {str(tmp_path / "seen")!r})
"""
    run_rank(tmp_path, code)
    said = read_error(str(tmp_path / "seen"))
    assert said is not None
    assert (said.rank, said.restart, said.code, said.kind) == (3, 1, 7, "SystemExit")


def test_all_evidence_of_a_rank_is_read(tmp_path: Path) -> None:
    path = tmp_path / names.evidence("0")
    spec = StrategySpec({"amp": True, "dgc": True}, {}, {})
    proof = island.Evidence(str(path), spec)
    proof.knob("amp", island.EFFECTIVE, in_effect=True, reason="so", evidence="3 casts")
    proof.disagree("dgc", script=False, used=False)
    proof.note("A remark.")
    proof.failures.append("A count has failed.")
    proof.graph, proof.updates, proof.ranks_equal, proof.compared_after = "dygraph", 1, True, 3
    proof.counts |= {
        "gradients": 4,
        "allreduces_before": 4,
        "allreduces": 2,
        "bucket_bytes": [8, 8],
        "communicators": 1,
        "groups": [[0, 1]],
    }
    proof.claim()
    proof.write()
    assert strategyfiles.parse_evidence(path.read_bytes()) == RankEvidence(
        is_complete=True,
        where="dygraph",
        fields=(FieldEvidence("amp", "true", "true", "effective", "3 casts. so"),),
        notes=("A remark.",),
        disagreements=("The script sets dgc to false, the strategy to true: false is used.",),
        ranks_equal=True,
        compared_after=3,
        counts=GradientCounts(4, 4, 2, (8, 8), 1, ((0, 1),)),
        failures=("A count has failed.",),
    )


def test_both_sides_have_the_same_words_and_schema() -> None:
    said = {island.EFFECTIVE, island.NO_EFFECT, island.REFUSED, island.SCRIPT}
    assert said == strategyfiles.STATUSES
    assert island.NO_WORD == strategyfiles.NO_WORD
    assert island.SCHEMA == strategyfiles.SCHEMA
    source = (SITE / "sitecustomize.py").read_text(encoding="utf-8")
    assert f'"{stacks.MEMORY}"' in source


def test_the_step_of_a_heartbeat_is_read(tmp_path: Path) -> None:
    path = tmp_path / names.heartbeat("0")
    proof = island.Evidence(str(tmp_path / names.evidence("0")), StrategySpec({}, {}, {}))
    heartbeats.HeartbeatFile(str(path), proof.claim).beat(None, 12)
    assert read_step(str(path)) == 12
    assert not is_scripts(str(path))
    path.write_text("13\n")
    assert is_scripts(str(path))
