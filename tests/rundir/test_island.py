"""The ranks' writers and the launcher's readers agree, name by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import fleetrun
from fleetrun.inject import evidence as island
from fleetrun.inject.site import rank_records
from fleetrun.inject.spec import StrategySpec
from fleetrun.model import FieldVerdict
from fleetrun.postmortem import stackdumps
from fleetrun.rundir import names, rankfile, strategyfiles, variables
from fleetrun.rundir.strategyfiles import RankEvidence

if TYPE_CHECKING:
    import pytest

SITE = Path(fleetrun.__file__).parent / "inject" / "site"


def run_rank(folder: Path, code: str) -> str:
    """Run CODE as rank 3 in its second attempt, with its error file in FOLDER."""
    env = {
        **os.environ,
        "PYTHONPATH": str(SITE),
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_RESTART_COUNT": "1",
        variables.RECORDS: str(folder / names.rank_records("3")),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    return done.stdout


def test_a_secret_that_the_script_has_replaced_is_hidden_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import os
os.environ["MY_TOKEN"] = "later-hunter-4711"
raise ValueError("first-hunter-4711 later-hunter-4711")
"""
    monkeypatch.setenv("MY_TOKEN", "first-hunter-4711")
    run_rank(tmp_path, code)
    error = rankfile.error(str(tmp_path / names.rank_records("3")), restart=1)
    assert error is not None
    assert error.message == "*** ***"


def test_an_exit_that_is_under_way_is_noted_where_the_launcher_looks(tmp_path: Path) -> None:
    run_rank(tmp_path, "import sys\nsys.exit(7)")
    error = rankfile.error(str(tmp_path / names.rank_records("3")), rankfile.EXIT, restart=1)
    assert error is not None
    assert (error.rank, error.restart, error.code) == (3, 1, 7)


def test_all_evidence_of_a_rank_is_read(tmp_path: Path) -> None:
    path = tmp_path / names.rank_records("0")
    spec = StrategySpec({"amp": True, "dgc": True}, {}, {})
    proof = island.Evidence(str(path), spec)
    proof.field("amp", island.EFFECTIVE, in_effect=True, reason="so", evidence="3 casts")
    proof.disagree("dgc", script=False, used=False)
    proof.note("A remark.")
    proof.failures.append("A count has failed.")
    proof.graph, proof.ranks_equal, proof.compared_after = "dygraph", True, 3
    proof.count_updates = lambda: 1
    proof.claim()
    proof.write()
    assert strategyfiles.parse_evidence(rankfile.evidence(str(tmp_path), "0")) == RankEvidence(
        is_complete=True,
        where="dygraph",
        fields=(FieldVerdict("amp", "true", "true", "effective", "3 casts. so"),),
        notes=("A remark.",),
        disagreements=("The script sets dgc to false, the strategy to true: false is used.",),
        ranks_equal=True,
        compared_after=3,
        failures=("A count has failed.",),
    )


def test_both_sides_have_the_same_words_and_schema() -> None:
    statuses = {
        island.EFFECTIVE,
        island.NO_DIFFERENCE,
        island.NO_EFFECT,
        island.REFUSED,
        island.SCRIPT,
    }
    assert statuses == strategyfiles.STATUSES
    assert island.NO_WORD == strategyfiles.NO_WORD
    for name in ("SCHEMA", "EXCEPTION", "EXIT", "STRATEGY", "UPDATE"):
        assert getattr(rank_records, name) == getattr(rankfile, name)
    source = (SITE / "sitecustomize.py").read_text(encoding="utf-8")
    assert f'"{stackdumps.MEMORY}"' in source
    failures = (SITE / "rank_failures.py").read_text(encoding="utf-8")
    for text in (rankfile.EXCEPTION, rankfile.EXIT):
        assert f'"{text}"' in failures
