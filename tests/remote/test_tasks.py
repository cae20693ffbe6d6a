"""A task for each rank: the first task of a host leads, the others serve it."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from waiting import LONG_S

from fleetrun.cli import app
from fleetrun.errors import EnvironmentFault, RendezvousError
from fleetrun.model import Task
from fleetrun.remote import tasks
from fleetrun.remote.tasks import TaskPlace

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.extended

ALL = 3


def start(command: Command, local: int) -> subprocess.Popen[bytes]:
    """Start the fleetrun that an MPI would start as task LOCAL of one host."""
    env = {
        "OMPI_COMM_WORLD_RANK": str(local),
        "OMPI_COMM_WORLD_SIZE": str(ALL),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(ALL),
        "PMIX_NAMESPACE": command.marker,
    }
    cpus = sorted(os.sched_getaffinity(0))
    cpu = cpus[local % len(cpus)]
    pin = f"import os, sys; os.sched_setaffinity(0, [{cpu}]); os.execv(sys.argv[1], sys.argv[1:])"
    return command.start([sys.executable, "-c", pin], env=env)


def started(command: Command) -> list[subprocess.Popen[bytes]]:
    command.argv = [word for word in command.argv if not word.startswith("--nproc_per_node")]
    # The last one first: tasks may start in any order.
    return [start(command, local) for local in reversed(range(ALL))][::-1]


def test_one_job_has_a_rank_in_the_place_of_each_task(tmp_path: Path) -> None:
    command = Command(
        tmp_path,
        "echo $PADDLE_TRAINERS_NUM $PADDLE_LOCAL_RANK $OMPI_COMM_WORLD_RANK "
        "$(grep Cpus_allowed_list /proc/self/status) > $R",
    )
    leader, *others = started(command)
    outputs = [process.communicate(timeout=LONG_S) for process in others]
    ended = command.finish(leader)
    assert (ended.code, [process.returncode for process in others]) == (0, [0, 0]), ended.stderr
    assert outputs == [(b"", b"")] * 2
    cpus = sorted(os.sched_getaffinity(0))
    for rank in range(ALL):
        words = (tmp_path / str(rank)).read_text().split()
        cpu = str(cpus[rank % len(cpus)])
        assert words == ["3", str(rank), str(rank), "Cpus_allowed_list:", cpu]


@pytest.mark.parametrize("is_killed", [False, True])
def test_only_the_first_task_ends_with_the_exit_code_of_the_job(
    tmp_path: Path, *, is_killed: bool
) -> None:
    command = Command(tmp_path, "touch up.$R; [ $R != $CULPRIT ] || exit 7; sleep 1000")
    command.argv[-1:-1] = ["--env", f"CULPRIT={9 if is_killed else 1}"]
    leader, *others = started(command)
    if is_killed:
        command.wait_for("up.0", "up.1", "up.2")
        # If a job is cancelled and all get TERM, the others wait for the first one.
        for process in others:
            process.send_signal(signal.SIGTERM)
        leader.kill()
    for process in others:
        process.communicate(timeout=LONG_S)
    ended = command.finish(leader)
    codes = [process.returncode for process in (leader, *others)]
    assert codes == ([-9, 137, 137] if is_killed else [7, 0, 0]), ended.stderr


def test_a_first_task_that_does_not_come_is_not_waited_for_for_ever() -> None:
    here = TaskPlace(f"\0fleetrun/tasks/test/{os.getpid()}", 1, 3)
    with pytest.raises(RendezvousError, match=r"first of the 3 tasks of this host did not join"):
        tasks.follow(here, Task((), {}), 0.001)
    with (
        pytest.raises(RendezvousError, match=r"Of 3 tasks of this host 1, 2 did not join"),
        tasks.led(here, Task((), {}), 0.001),
    ):
        pass
    with (
        tasks.led(here._replace(tasks=1), Task((), {}), 0.001),
        pytest.raises(RendezvousError, match=r"first of the 1 tasks of this host did not join"),
    ):
        tasks.follow(here._replace(tasks=1), Task((), {}), 0.001)


@pytest.mark.parametrize(
    ("masks", "together"),
    [(["0", "1"], "0,1"), (["0,1", "2,3"], "0,1,2,3"), (["0,1", "0,1"], None), (["", ""], None)],
)
def test_devices_of_the_tasks_are_those_of_the_launcher(
    masks: list[str], together: str | None
) -> None:
    variables = tasks.together([Task((), {"CUDA_VISIBLE_DEVICES": mask}) for mask in masks])
    assert variables.get("CUDA_VISIBLE_DEVICES") == together


@pytest.mark.parametrize("masks", [["0,1", "1"], ["0", ""]])
def test_devices_that_are_not_shared_out_are_one_sentence(masks: list[str]) -> None:
    with pytest.raises(EnvironmentFault, match=r"^CUDA_VISIBLE_DEVICES is .* in tasks of this"):
        tasks.together([Task((), {"CUDA_VISIBLE_DEVICES": mask}) for mask in masks])


def test_a_dry_run_is_shown_by_one_task_without_the_others(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "t.py").touch()
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "SLURM_LOCALID": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert app.main(["--dry-run", "t.py"], environ=environ) == 0
    assert "4 processes" in capsys.readouterr().out
