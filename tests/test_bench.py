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
    little = ["--ranks=2", "--rounds=1", "--heavy-ranks=0", "--idle-s=0.2"]
    shown = ("2 ranks, median", "x bare", "fleetrun --help")
    results = bench(tmp_path, ["launch", *little], shown)
    assert not results["failures"]
    assert [(row["launcher"], row["ranks"]) for row in results["launches"]] == [
        (launcher, 2) for launcher in ("bare loop", "fleetrun", "fleetrun again")
    ]
    for launch in results["launches"]:
        (row,) = launch["rounds"]
        assert 0 < row["first_line_s"] <= row["last_line_s"]
        assert row["exit_lag_s"] > 0
        assert row["peak_rss"] > 1e6
    assert all(len(walls) == 3 for walls in results["quick"].values())


def test_bench_faults_measures_everything(tmp_path: Path) -> None:
    little = ["--ranks=2", "--rounds=2", "--heavy-ranks=0", "--grace=0.2"]
    shown = ("2 ranks: a rank fails;", "ignore TERM", "SIGTERM to the launcher")
    results = bench(tmp_path, ["faults", *little], shown)
    assert not results["failures"]
    fails, deaf, term = (row["rounds"] for row in results["faults"])
    assert [row["asked"] for row in (*fails, *deaf, *term)] == [1, 1, 1, 1, 2, 2]
    assert all(0 < row["first_term_s"] <= row["exit_s"] for row in (*fails, *term))
    assert all(row["exit_s"] >= 0.2 for row in deaf)
    assert not any(row["left"] for row in (*fails, *deaf, *term))


@pytest.mark.train
@pytest.mark.long
def test_bench_strategy_compares_in_turns(tmp_path: Path) -> None:
    little = ["--only=fusion:many", "--repeats=1", "--turns=2", "--warm-up=1", "--cpu"]
    results = bench(tmp_path, ["strategy", *little], ("fusion, many", "ratio (quartiles)"))
    assert not results["failures"]
    (fusion,) = (row["pairs"][0] for row in results["comparisons"])
    assert [len(fusion[side]) for side in ("first", "other")] == [2, 2]
    assert all(wall_s > 0 < cpu_s for wall_s, cpu_s in fusion["first"])
    # 300 gradients.
    assert [allreduces for allreduces, _ in fusion["proofs"]] == [1, 300]
    assert all(peak_bytes > 1 << 20 for _, peak_bytes in fusion["proofs"])


@pytest.mark.multinode
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_bench_nodes_measures_everything(tmp_path: Path) -> None:
    little = ["--hosts=2", "--rounds=1", "--heavy-hosts=0", "--give-up-s=20"]
    document = bench(tmp_path, ["nodes", *little], ("2 hosts, one rank each", "x unconnected"))
    assert not document["failures"]
    rounds = {row["launcher"]: row["rounds"][0] for row in document["nodes"]}
    assert [*rounds] == ["unconnected", "fleetrun --ips", "fleetrun --master"]
    assert all(0 < row["first_s"] <= row["last_s"] for row in rounds.values())
    assert all(rounds[name]["exit_s"] > 0 for name in ("fleetrun --ips", "fleetrun --master"))
