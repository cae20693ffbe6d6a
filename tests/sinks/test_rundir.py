"""The run directory: nothing is lost or mixed up, no secret is written, old ones are removed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import plans
import pytest
from timers import Timers

from fleetrun.errors import EnvironmentFault
from fleetrun.model import SharedLogs
from fleetrun.run.events import Gathered, Started
from fleetrun.sinks.rundir import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import LaunchPlan


def plan(folder: Path, run: str, ranks: int = 2) -> LaunchPlan:
    env = {"HF_TOKEN": "s3cret", "http_proxy": "http://me:s3cret@proxy:3128", "SAME": "for all"}
    return plans.plan(
        per_node=ranks,
        argv=("python", "train.py"),
        env=env,
        cwd=str(folder),
        run_dir=f"log/runs/{run}",
    )


def begin(
    made: LaunchPlan,
    *,
    keep: int = 20,
    overwrite: bool = False,
    log: Callable[[str], None] = plans.refuse,
) -> RunDirectory:
    """Act like a launcher until all ranks run."""
    job = plans.job(made, log=log, log_keep=keep, log_overwrite=overwrite)
    rundir = RunDirectory(job)
    rundir.prepare()
    timers = Timers()
    rundir.open(timers)
    for place, spec in enumerate(made.processes):
        with open(f"{made.cwd}/{made.run_dir}/{spec.log}", "a") as file:  # as the rank does
            file.write(f"{made.run_dir} rank {place}\n")
        rundir.on_event(Started(place, f"rank {place}", 100 + place, 0.0))
    timers.elapse("old runs")
    return rundir


def launch(made: LaunchPlan, *, keep: int = 20, overwrite: bool = False) -> None:
    begin(made, keep=keep, overwrite=overwrite).close()


def runs(folder: Path) -> list[str]:
    return sorted(run.name for run in (folder / "log" / "runs").iterdir())


def test_the_names_users_know_lead_to_the_last_launch(tmp_path: Path) -> None:
    for run in ("1", "2"):
        launch(plan(tmp_path, run))
        log = tmp_path / "log"
        assert (log / "workerlog.1").read_text() == f"log/runs/{run} rank 1\n"
        assert (log / "latest").resolve() == log / "runs" / run
        # Relative, so that the folder may be moved.
        assert str((log / "workerlog.1").readlink()) == f"runs/{run}/workerlog.1"
    assert (tmp_path / "log/runs/1/workerlog.1").read_text() == "log/runs/1 rank 1\n"


def test_what_paddle_left_there_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    for number, text in enumerate(("first", "second")):
        (log / "workerlog.0").unlink(missing_ok=True)
        (log / "workerlog.0").write_text(text)
        launch(plan(tmp_path, str(number)))
    assert (log / "workerlog.0.old").read_text() == "first"
    assert (log / "workerlog.0.old.2").read_text() == "second"
    assert (log / "workerlog.0").is_symlink()


def test_old_launches_go_but_only_launches(tmp_path: Path) -> None:
    (tmp_path / "log/runs/0-notes").mkdir(parents=True)
    for run in "12345":
        launch(plan(tmp_path, run), keep=3)
    assert runs(tmp_path) == ["0-notes", "3", "4", "5"]


def test_a_launch_that_goes_on_is_not_removed_nor_are_its_names(tmp_path: Path) -> None:
    going_on = begin(plan(tmp_path, "1", ranks=4))
    printed: list[str] = []
    begin(plan(tmp_path, "2"), overwrite=True, log=printed.append).close()
    assert runs(tmp_path) == ["1", "2"]
    (line,) = printed
    assert f"1 (process {os.getpid()}) still runs in this folder" in line
    log = tmp_path / "log"
    assert (log / "workerlog.3").read_text() == "log/runs/1 rank 3\n"
    assert (log / "workerlog.1").read_text() == "log/runs/2 rank 1\n"
    going_on.close()


def test_the_log_of_a_host_that_came_later_is_found_by_the_jobs_own_count(tmp_path: Path) -> None:
    ranks = plan(tmp_path, "1").ranks
    both = (ranks[0], ranks[1]._replace(local_rank=0, node_rank=1))
    alone = plan(tmp_path, "1", ranks=1)._replace(
        shared_logs=SharedLogs("1", ".marker", folders={}),
    )
    made = begin(alone)
    shared = SharedLogs("1", ".marker", folders={1: "node1.1"}, attempts={0: 1, 1: 0})
    later = alone._replace(ranks=both, generation=1, shared_logs=shared)
    (tmp_path / "log" / "runs" / "1" / "node1.1").mkdir()
    (tmp_path / "log" / "runs" / "1" / "node1.1" / "workerlog.1").write_text("its first")
    made._job.plan = later
    made.on_event(Gathered(1, later, 1.0))
    assert (tmp_path / "log" / "runs" / "1" / "workerlog.1.attempt1").read_text() == "its first"
    assert (tmp_path / "log" / "workerlog.1").read_text() == "its first"
    made.close()


def test_nothing_is_left_of_a_launch_that_is_withdrawn(tmp_path: Path) -> None:
    for name in ("1", "2"):
        sink = RunDirectory(plans.job(plan(tmp_path, name)))
        sink.prepare()
        (tmp_path / f"log/runs/{name}/workerlog.0").touch()
        sink.withdraw()
        assert not (tmp_path / "log").exists()
    begin(plan(tmp_path, "0"))
    sink = RunDirectory(plans.job(plan(tmp_path, "3")))
    sink.prepare()
    sink.withdraw()
    assert os.listdir(tmp_path / "log/runs") == ["0"]


def test_of_two_launches_with_one_name_the_second_is_refused(tmp_path: Path) -> None:
    first, second = (RunDirectory(plans.job(plan(tmp_path, "0"))) for _ in range(2))
    first.prepare()
    with pytest.raises(EnvironmentFault, match="in the same second with the same process id"):
        second.prepare()
    second.withdraw()
    assert os.listdir(tmp_path / "log/runs/0") == ["lock"]
    first.withdraw()


def test_what_is_told_of_a_launch_is_its_owners_and_the_rest_follows_the_umask(
    tmp_path: Path,
) -> None:
    private = ("plan.json", "lock")
    for umask, folder, log in ((0o022, 0o755, 0o644), (0o002, 0o775, 0o664), (0o077, 0o700, 0o600)):
        before = os.umask(umask)
        try:
            run = f"{umask:03o}"
            launch(plan(tmp_path, run))
        finally:
            os.umask(before)
        run_dir = tmp_path / "log/runs" / run
        assert {stat.S_IMODE((run_dir / name).stat().st_mode) for name in private} == {0o600}
        assert stat.S_IMODE(run_dir.stat().st_mode) == folder
        assert stat.S_IMODE((run_dir / "endpoints.log").stat().st_mode) == log
