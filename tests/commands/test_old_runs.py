"""Runs of fleetrun before 1.0 are read by today's commands; golden/schema-1.json has some."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commandline import fleetrun

if TYPE_CHECKING:
    from subprocess import CompletedProcess

STORED = json.loads((Path(__file__).parents[1] / "golden" / "schema-1.json").read_text("utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for run, files in STORED.items():
        path = tmp_path / "log" / "runs" / run
        path.mkdir(parents=True)
        for name, text in files.items():
            (path / name).write_text(text, encoding="utf-8")
    return tmp_path


def output(done: CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_logs_shows_their_output_and_who_failed_first(folder: Path) -> None:
    listed = output(fleetrun("logs", "--runs", folder=folder))
    assert [listed.count(word) for word in ("-done-", "-failed-", "-restarted-")] == [1, 1, 1]
    assert "rank 1 exited with 1" in listed
    failed = output(fleetrun("logs", "failed", "--failed", folder=folder))
    assert "no such column: label" in failed
    assert "on 0" not in failed
    second = output(fleetrun("logs", "restarted", "--attempt=1", folder=folder))
    assert sorted(second.split("\n"))[1:] == [
        *(f"[rank {rank}] step 1 loss 0.5 on {rank}, attempt 1" for rank in range(2))
    ]


@pytest.mark.extended
def test_top_shows_how_their_ranks_ended(folder: Path) -> None:
    table = output(fleetrun("top", "--once", "failed", folder=folder, COLUMNS="160"))
    assert "rank 1 exited with 1" in table
    assert "exit 1" in table or "failed" in table


def test_ps_shows_one_whose_launcher_still_runs(folder: Path) -> None:
    (run,) = (folder / "log" / "runs").glob("*-restarted-*")
    with (run / "lock").open():
        # This process counts as its launcher, because it holds the lock.
        shown = output(fleetrun("ps", run.name))
    heads, row = shown.splitlines()
    assert heads.split()[:2] == ["PID", "JOB"]
    assert f"{os.getpid()}  restarted" in row
    assert "0 of 2, attempt 1" in row


@pytest.mark.extended
def test_report_has_their_strategy_and_their_restart(folder: Path) -> None:
    for run, word in (("strategy", "fuse_grad_size_in_MB"), ("restarted", "restarting")):
        assert output(fleetrun("report", run, folder=folder))
        (page,) = (folder / "log" / "runs").glob(f"*-{run}-*/report.html")
        assert word in page.read_text(encoding="utf-8")
