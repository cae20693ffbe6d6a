"""`scripts/bench` measures what it says, as a table and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access(ROOT / ".venv" / "bin" / "python", os.X_OK), reason="there is no .venv"
    ),
]


def bench(folder: Path, words: list[str], shown: tuple[str, ...], **env: str) -> Any:
    """Run `scripts/bench WORDS`, whose tables have each text of SHOWN; return its numbers."""
    numbers = folder / "numbers.json"
    done = subprocess.run(
        [ROOT / "scripts" / "bench", *words, "--json", numbers],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for text in shown:
        assert text in done.stdout
    return json.loads(numbers.read_text())


def test_bench_launch_measures_everything(tmp_path: Path) -> None:
    little = ["--ranks=1,2", "--rounds=1", "--heavy-ranks=0", "--lines=2000", "--idle-s=0.2"]
    command = f"fleetrun is started as `{ROOT / '.venv' / 'bin' / 'fleetrun'}`"
    shown = ("2 ranks, median", "null pair", "fleetrun --help", "2000 lines", "Goals", command)
    results = bench(tmp_path, ["launch", *little], shown)
    assert [(row["launcher"], row["ranks"]) for row in results["launches"]] == [
        (launcher, ranks)
        for ranks in (1, 2)
        for launcher in ("bare loop", "fleetrun", "fleetrun again")
    ]
    for launch in results["launches"]:
        for row in launch["rounds"]:
            assert 0 < row["first_line_s"] <= row["last_line_s"]
            assert row["exit_lag_s"] > 0
            assert row["peak_rss"] > 1e6
    floods = results["lines"]["fleetrun"]
    assert all(row["lines_in_log"] == row["lines_on_console"] == 2000 for row in floods)
    (lines,) = (goal for goal in results["goals"] if goal["what"].startswith("lines in"))
    assert lines["reached"] is True
    assert not any(name.startswith("fleetrun") for name in results["failures"])


def test_bench_faults_measures_everything(tmp_path: Path) -> None:
    little = ["--ranks=2", "--rounds=2", "--heavy-ranks=0", "--grace=0.2"]
    shown = ("2 ranks: a rank fails;", "ignore TERM", "SIGTERM to the launcher", "Goals")
    results = bench(tmp_path, ["faults", *little], shown)
    rows = [row for row in results["faults"] if row["launcher"] == "fleetrun"]
    ours = {row["fault"]: row["rounds"] for row in rows}
    fails, deaf, term = ours.values()
    assert [row["asked"] for row in (*fails, *deaf, *term)] == [1, 1, 1, 1, 2, 2]
    assert all(0 < row["first_term_s"] <= row["exit_s"] for row in (*fails, *term))
    assert all(row["exit_s"] >= 0.2 for row in deaf)
    assert not any(row["left"] for row in (*fails, *deaf, *term))
    assert not any(name.startswith("fleetrun") for name in results["failures"])


@pytest.mark.train
def test_bench_strategy_compares_in_turns(tmp_path: Path) -> None:
    only = "--only=reducer:many,fusion:many,hooks:many"
    little = [only, "--repeats=1", "--turns=1", "--warm-up=1", "--cpu"]
    shown = ("reducer that the strategy brings", "one per gradient", "Goals")
    results = bench(tmp_path, ["strategy", *little], shown)
    assert not results["failures"]
    reducer, fusion, hooks = results["comparisons"]
    assert [len(reducer[side]) for side in ("one", "other", "ratios")] == [1, 1, 1]
    assert all(turn["cpu_s"] > 0 for side in ("one", "other") for turn in reducer[side])
    assert reducer["ratio"] > 0
    # 300 gradients, in 0.6 MB.
    assert reducer["proofs"][0]["counts"]["allreduces"] == 1
    assert [proof["counts"]["allreduces"] for proof in fusion["proofs"]] == [1, 300]
    assert "300 gradients in 1 allreduce" in fusion["proofs"][0]["evidence"]["fuse_all_reduce_ops"]
    assert all(proof["peak_bytes"] > 1 << 20 for proof in fusion["proofs"])
    assert [goal["what"].rpartition(": ")[2] for goal in results["goals"]] == ["many"] * 3
    # What differs little is measured more often.
    assert len(hooks["ratios"]) == 3


@pytest.mark.multinode
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_bench_nodes_measures_everything(tmp_path: Path) -> None:
    little = ["--hosts=2", "--rounds=1", "--heavy-hosts=0", "--give-up-s=20"]
    shown = ("2 hosts, one rank each", "unconnected", "Goals")
    document = bench(tmp_path, ["nodes", *little], shown)
    starts = {start["launcher"]: start["rounds"] for start in document["starts"]}
    for name in ("unconnected", "fleetrun --ips"):
        assert 0 < starts[name][0]["first_s"] <= starts[name][0]["last_s"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multinode
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("engine", ["ssh", "slurm", "mpi"])
def test_bench_nodes_measures_an_engine_and_fleetrun_below_it(tmp_path: Path, engine: str) -> None:
    little = ["--hosts=2", "--rounds=1", f"--engine={engine}"]
    document = bench(tmp_path, ["nodes", *little], ("the engine alone", "fleetrun"))
    (row,) = document["seconds"]
    assert row["hosts"] == 2
    assert row["the engine alone"][0] > 0
    assert row["fleetrun"][0] > 0
