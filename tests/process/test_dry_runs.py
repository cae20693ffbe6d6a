"""A dry run of a job on several hosts shows that job, and says what only the meeting decides."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from checkout import environ

if TYPE_CHECKING:
    from pathlib import Path

MASTER = "10.83.0.1:8090"


def shown(folder: Path, *words: str, code: int = 0) -> str:
    (folder / "job.py").write_text("print(1)\n")
    argv = [sys.executable, "-m", "fleetrun", *words, "--nproc_per_node=1", "job.py"]
    done = subprocess.run(
        argv, cwd=folder, env=environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("nnodes", ["2", "2:3"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_dry_run_of_hosts_that_meet_shows_all_of_them(
    tmp_path: Path, nnodes: str, rank: int
) -> None:
    words = (f"--nnodes={nnodes}", f"--rank={rank}", f"--master={MASTER}")
    nodes = json.loads(shown(tmp_path, *words, "--dry-run=json"))["nodes"]
    world = int(nnodes[-1])
    assert [node["here"] for node in nodes] == [place == rank for place in range(world)]
    for place, node in enumerate(nodes):
        env = node["processes"][0]["env"]
        assert env["PADDLE_TRAINERS_NUM"] == str(world)
        assert env["PADDLE_TRAINER_ID"] == str(place)
        assert env.get("GLOO_SOCKET_IFNAME") != "lo"
        assert node["host"] == f"HOST-{place}"
        assert any(MASTER in note and "HOST-N" in note for note in node["notes"])
    table = shown(tmp_path, *words, "--dry-run")
    assert f"{world} processes on {world} nodes" in table
    assert "HOST-N stands for" in table


def test_a_master_without_a_number_of_hosts_is_told_of_it(tmp_path: Path) -> None:
    assert "--nnodes=N" in shown(tmp_path, f"--master={MASTER}")
