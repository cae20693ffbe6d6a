"""A launch below real engines: one task for each rank, and from inside an allocation."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from processes import MARKER, assert_no_survivors, survivors
from slurm import Slurm, missing, slurm
from waiting import LONG_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab import Host

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.long]

FLEETRUN = (sys.executable, "-m", "fleetrun", "--quiet", "--tee")
RANK = """#!/bin/sh
echo "$PADDLE_TRAINER_ID of $PADDLE_TRAINERS_NUM" $OMPI_COMM_WORLD_RANK$SLURM_PROCID$PMI_RANK
touch up.$PADDLE_TRAINER_ID
[ "$PADDLE_TRAINER_ID" != "$FAIL" ] || exit 7
[ -z "$FAIL$HOLD" ] || { trap "touch asked.$PADDLE_TRAINER_ID; exit 0" TERM; sleep 1000 & wait; }
"""


class Job:
    """A script and its environment, with its own marker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = folder / "rank.sh"
        script.write_text(RANK)
        script.chmod(0o755)
        self.marker = uuid.uuid4().hex
        self.words = (*FLEETRUN, str(script))

    def env(self, **more: str) -> dict[str, str]:
        """Return the environment in which it starts, with MORE."""
        own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", MARKER: self.marker}
        allowed = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
        return {**os.environ, **own, **allowed, **more}

    def run(self, command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
        """Run COMMAND to its end; no process may be left."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env(**more),
            capture_output=True,
            text=True,
            check=False,
            timeout=LONG_S,
        )
        assert_no_survivors(self.marker)
        return done


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture(params=["mpirun.openmpi --oversubscribe", "mpirun.mpich"])
def mpirun(request: pytest.FixtureRequest) -> list[str]:
    """Return the words of a real MPI."""
    words: list[str] = request.param.split()
    if not shutil.which(words[0]):
        pytest.skip(f"there is no {words[0]} here (Debian: apt install openmpi-bin mpich)")
    return words


def test_a_task_for_each_rank_by_a_real_mpi(job: Job, mpirun: list[str]) -> None:
    command = [*mpirun, "-n", "3", *job.words]
    done = job.run(command)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert lines == ["0 of 3 0", "1 of 3 1", "2 of 3 2"]
    done = job.run(command, FAIL="2")
    assert done.returncode == 7, done.stderr
    assert "rank 2 exited with 7" in done.stderr
    alone = job.run([*mpirun, "-n", "1", *job.words])
    assert (alone.returncode, alone.stdout) == (0, "0 of 1 0\n")


def test_nothing_is_left_when_mpirun_is_killed(job: Job, mpirun: list[str]) -> None:
    with subprocess.Popen(
        [*mpirun, "-n", "2", *job.words],
        cwd=job.folder,
        env=job.env(HOLD="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        until(lambda: all((job.folder / f"up.{rank}").exists() for rank in range(2)))
        process.kill()
    assert_no_survivors(job.marker)


def strike_task(job: Job, command: list[str], number: int) -> int:
    """Kill task NUMBER of a host once all ranks of COMMAND are up; return the exit code."""
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    entries = {f"{name}={number}".encode() for name in names}
    with subprocess.Popen(
        command,
        cwd=job.folder,
        env=job.env(HOLD="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        # A Slurm step runs in the host's own folder.
        until(lambda: len([*job.folder.glob("up.*"), *job.folder.glob("*/up.*")]) == 3)
        # The ranks have these variables, too; a leading task also has the guard.
        tasks = [
            pid
            for pid, line in survivors(job.marker).items()
            if "-m fleetrun" in line
            and "srun" not in line
            and entries & set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        ]
        assert tasks
        for pid in tasks:
            os.kill(pid, signal.SIGKILL)
        errors = process.communicate(timeout=LONG_S)[1].decode()
    assert_no_survivors(job.marker)
    # Hydra kills all others at once, and says so itself.
    if number and command[0] != "mpirun.mpich":
        assert f"The engine's task of rank {number} is gone (kill -9?)" in errors, errors
    return process.returncode


@pytest.mark.parametrize("number", [0, 2])
def test_a_task_of_a_real_mpi_that_is_killed_ends_the_job(
    job: Job, mpirun: list[str], number: int
) -> None:
    assert strike_task(job, [*mpirun, "-n", "3", *job.words], number) in {137, 9}


@pytest.fixture
def cluster(two_hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Slurm]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm(two_hosts, tmp_path / "slurm") as made:
        yield made


def test_a_task_for_each_rank_by_slurm(job: Job, cluster: Slurm) -> None:
    command = cluster.command("srun", "--nodes=2", "--ntasks=4", *job.words)
    done = job.run(command)
    assert done.returncode == 0, done.stderr
    ranks = [line.rpartition("] ")[2] for line in done.stdout.splitlines()]
    assert sorted(ranks) == [f"{rank} of 4 {rank}" for rank in range(4)]
    # On one host no launcher waits for another when Slurm kills all at the first bad exit.
    alone = cluster.command("srun", "--nodes=1", "--ntasks=3", "-K1", *job.words)
    assert job.run(alone, FAIL="2").returncode == 7


@pytest.mark.parametrize("number", [0, 2])
def test_a_task_of_slurms_that_is_killed_ends_the_job(
    job: Job, cluster: Slurm, number: int
) -> None:
    command = cluster.command("srun", "--nodes=1", "--ntasks=3", *job.words)
    assert strike_task(job, command, number) == 137


def test_a_shell_in_an_allocation_starts_a_launcher_on_each_host(job: Job, cluster: Slurm) -> None:
    command = cluster.command("salloc", "--nodes=2", *job.words)
    done = job.run(command)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2 0", "1 of 2 1"]
    assert job.run(command, FAIL="1").returncode == 7


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_the_launch_in_an_allocation_ends_it_everywhere(
    job: Job, cluster: Slurm, signum: int
) -> None:
    shell = '"$@" & echo $! > pid; wait $!; echo ended $?'
    command = cluster.command("salloc", "--nodes=2", "sh", "-c", shell, "sh", *job.words)
    with subprocess.Popen(
        command, env=job.env(HOLD="1"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        folder = job.folder / "node-1"
        until(lambda: all((folder / f"up.{rank}").exists() for rank in range(2)))
        pid = (folder / "pid").read_text().strip()
        done = cluster.run("kill", f"-{int(signum)}", pid)
        assert done.returncode == 0, done.stderr
        out, _ = process.communicate(timeout=LONG_S)
    assert f"ended {128 + signum}" in out
    assert_no_survivors(job.marker)
    asked = sorted(path.name for path in folder.glob("asked.*"))
    # When a launcher is killed, either its guard kills the ranks or Slurm terminates them first.
    assert signum == signal.SIGKILL or asked == ["asked.0", "asked.1"]


def test_a_preempted_job_ends_with_grace_and_begins_again(job: Job, cluster: Slurm) -> None:
    words = ("--nodes=2", "--requeue", "--partition=low", "--sbatch=exclusive")
    submit = [sys.executable, "-m", "fleetrun", "submit", "slurm", *words, "--", *job.words[3:]]
    done = subprocess.run(
        cluster.command(*submit), env=job.env(HOLD="1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    number, folder = done.stdout.split()[-1], job.folder / "node-1"
    until(lambda: all((folder / f"up.{rank}").exists() for rank in range(2)))
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")

    def shown() -> str:
        return cluster.run("scontrol", "show", "job", number).stdout

    # Slurm lets it wait two minutes before it runs again. A busy scontrol may show nothing.
    until(lambda: "JobState=PENDING" in shown())
    assert " Restarts=1 " in shown()
    assert all((folder / f"asked.{rank}").exists() for rank in range(2))
    cluster.run("scancel", number)
    assert_no_survivors(job.marker)
