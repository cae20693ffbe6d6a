"""Samples of top: which ranks lag, which wait for which, and the speed of steps."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from metricsrecords import a_record
from runfolders import ring

from fleetrun.commands.top import sample
from fleetrun.commands.top.sample import RankRow
from fleetrun.rundir import metricsfile, names, planfile, runs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def a_row(rank: int, state: str, step: int | None) -> RankRow:
    return RankRow(f"rank {rank}", rank, state, "", "cpu", 1, step=step)


def states(*rows: RankRow) -> list[str]:
    return [f"{row.state}{'!' if row.is_odd else ''}" for row in sample.compared(rows)]


def test_ranks_that_stand_still_are_compared_by_their_steps() -> None:
    rows = [a_row(0, "silent 30s", 120), a_row(1, "silent 30s", 100), a_row(2, "silent 30s", 110)]
    assert states(*rows) == ["waits 30s", "behind 30s!", "silent 30s"]


def a_run(folder: Path, **ended: object) -> runs.Run:
    process = planfile.ProcessRecord("trainer.0", 0, ("true",), "workerlog.0")
    plan = planfile.PlanRecord("j", "collective", 0, ("h",), "/", (process,))
    log = runs.LogRecord(str(folder / "workerlog.0"), "trainer.0", 0, 0, None, 0.0)
    log = log._replace(**ended)  # type: ignore[arg-type]
    return runs.Run(str(folder), plan, (log,), "j", 0, None, 1, 1000.0, None, None, "", 0)


def sampler_of(run: runs.Run) -> sample.Sampler:
    """Return a sampler of RUN, of which no file but its logs exists."""
    sampler = sample.Sampler([run], pattern=None)
    sampler._reader.read = lambda path: run  # type: ignore[method-assign]  # noqa: ARG005
    return sampler


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the run directory FOLDER as a launcher does that runs on another host."""
    (folder / names.LOCK).write_text(f"fleetrun 1 {folder.name}\n")
    with (folder / names.LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize(
    ("ranks", "waits"),
    [(6, ["sum 2 for rank 4"] * 4 + ["", "sum 2 for rank 4"]), (3, ["sum 2"] * 3)],
    ids=["of all hosts", "of this host"],
)
def test_where_ranks_stand_still_the_collective_in_which_they_wait_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, waits: list[str]
) -> None:
    run = a_run(tmp_path)
    logs = [
        run.logs[0]._replace(process=f"trainer.{rank}", rank=rank, path=f"{tmp_path}/{rank}")
        for rank in range(ranks)
    ]
    run = run._replace(logs=tuple(logs))
    now = time.time()
    for rank in range(ranks):
        late = [] if rank == 4 else [(now - 100, 0)]
        (tmp_path / f"collectives.{rank}").write_bytes(ring(rank, [(now - 130, now - 129), *late]))
    with held(tmp_path):
        sampler = sampler_of(run)
        assert {row.waits for row in sampler.sample().rows} == {""}
        monkeypatch.setattr(sample, "_SILENT_S", 0.0)
        rows = sampler.sample().rows
    assert [row.waits.rpartition(", ")[0] for row in rows] == waits


def test_steps_come_from_the_heartbeat_or_else_from_the_log(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_text("step 7 loss 0.5\nsaved\n")
    run = a_run(tmp_path)
    sampler = sampler_of(run)
    [row] = sampler.sample().rows
    assert (row.step, row.loss, row.line, row.state) == (7, 0.5, "saved", "lost")
    (tmp_path / names.heartbeat("0")).write_text("9\n")
    [row] = sampler.sample().rows
    assert (row.step, row.loss) == (9, 0.5)


def test_a_rank_that_was_silent_before_anybody_looked_is_silent(tmp_path: Path) -> None:
    log = tmp_path / "workerlog.0"
    log.write_text("step 7 loss 0.5\n")
    long_ago = time.time() - 100
    os.utime(log, (long_ago, long_ago))
    run = a_run(tmp_path)
    with held(tmp_path):
        assert sampler_of(run).sample().rows[0].state == "silent 1m40s"
        (tmp_path / names.heartbeat("0")).write_text("9\n")
        assert sampler_of(run).sample().rows[0].state == "running"


def test_who_makes_no_more_steps_stands_still(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    sampler = sampler_of(run)
    speeds = []
    # The last step was some 2 s, and then 12 s, ago.
    for begin in (time.time() - 5, time.time() - 15):
        with held(tmp_path):
            for second in range(1, 4):
                beat = tmp_path / names.heartbeat("0")
                beat.write_text(f"{20 * second}\n")
                os.utime(beat, (begin + second, begin + second))
                speeds.append(sampler.sample().rows[0].steps_per_s)
        sampler = sampler_of(run)
    # The first step has no predecessor.
    assert speeds[0] is speeds[3] is None
    assert speeds[1:3] == [pytest.approx(20)] * 2
    assert speeds[4:] == [0.0, 0.0]
    # A rank that has ended has no speed.
    assert sampler.sample().rows[0].steps_per_s is None


def test_ends_are_told_by_what_they_were(tmp_path: Path) -> None:
    for ended, state in (
        ({"code": 0}, "done"),
        ({"code": 7, "has_failed": True}, "exit 7!"),
        ({"code": None, "signal": "SIGKILL", "has_failed": True}, "failed!"),
        ({"code": None, "signal": "SIGTERM"}, "ended"),
    ):
        run = a_run(tmp_path, ended_at=5.0, **ended)
        sampler = sampler_of(run)
        [row] = sampler.sample().rows
        assert f"{row.state}{'!' if row.is_odd else ''}" == state


def test_what_the_launcher_has_measured_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    run = a_run(folder)
    run = run._replace(logs=(run.logs[0]._replace(pid=11),))
    newest = a_record()._replace(time=time.time())
    metricsfile.append(str(folder / names.METRICS), newest)
    sampler = sampler_of(run)
    with held(folder):
        [row] = sampler.sample().rows
    assert (row.host, row.cpu_percent, row.memory_bytes) == ("h", 99.0, 1 << 30)
    assert (row.gpu_percent, row.gpu_memory_bytes, row.power_w) == (87.0, 10, 412.5)
    # It has ended.
    [row] = sampler.sample().rows
    assert (row.state, row.cpu_percent) == ("lost", None)


def test_the_time_that_is_left_is_unknown_while_a_rank_is_silent() -> None:
    def training(step: int, steps_per_s: float | None) -> RankRow:
        row = a_row(0, "running", step)
        return row._replace(total_steps=60, steps_per_s=steps_per_s)

    assert sample.eta_s([training(44, 2.0), training(20, 1.0)]) == 40
    assert sample.eta_s([training(44, 2.0), training(8, 0.0)]) is None
    # It has made its last step, and only waits for the others.
    assert sample.eta_s([training(44, 2.0), training(60, 0.0)]) == 8
    assert sample.eta_s([training(44, None)]) is None
