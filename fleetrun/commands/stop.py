"""`fleetrun stop`: ends a job of this user on this host, and waits until it is gone."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

import click

from fleetrun.commands import ps
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import jobs
from fleetrun.host.jobs import RunningJob
from fleetrun.printing import remark
from fleetrun.run import jobprocesses
from fleetrun.rundir.variables import JOB

# Processes of a killed launcher are gone within this time.
_SWEEP_S = 30.0
_AGAIN_S = 0.1


@click.command(
    "stop",
    help="Stop a job as SIGTERM does, and wait until nothing of it is left on this host. JOB is "
    "a process id or name from `fleetrun ps`; without it, the job of this folder.",
)
@click.option("--now", "is_now", is_flag=True, help="Kill the processes at once, without --grace.")
@click.option("--all", "is_all", is_flag=True, help="Stop all your jobs on this host.")
@click.argument("word", required=False, metavar="[JOB]", shell_complete=ps.complete)
def command(word: str | None, *, is_now: bool, is_all: bool) -> int:
    """Stop the job that WORD names."""
    running = jobs.find()
    if is_all and word is not None:
        raise UsageError("stop: give a JOB or --all, not both.")
    chosen = running if is_all else (meant(word, running),)
    # Ask all before waiting for any.
    asked_jobs = [(job, _ask(job)) for job in chosen]
    for job, pidfd in asked_jobs:
        _wait(job, pidfd, is_now=is_now)
    if not chosen:
        remark("no job of yours runs on this host.")
    return 0


def meant(word: str | None, known: tuple[RunningJob, ...]) -> RunningJob:
    """Return the job of KNOWN that WORD names; one whose launcher was killed must be named.

    Its processes are killed without grace, and a shell that was opened in the job is one of them.
    """
    running = tuple(job for job in known if job.launcher is not None)
    if word is not None or running or not known:
        return ps.meant(word, running if word is None else known, "stop")
    listed = ", ".join(job.name for job in known)
    raise UsageError(
        f"stop: no job of yours runs on this host, but processes of {listed} are left, whose "
        "launcher was killed: name it, or --all, to kill them."
    )


def _ask(job: RunningJob) -> int | None:
    """Send SIGTERM to the launcher of JOB; return a descriptor that becomes readable at its end."""
    if job.launcher is None:
        return None
    try:
        pidfd = os.pidfd_open(job.launcher)
    except ProcessLookupError:
        return None
    # The pid may have been reused before the descriptor was opened.
    if not any(other.name == job.name and other.launcher == job.launcher for other in jobs.find()):
        os.close(pidfd)
        return None
    _send(pidfd)
    return pidfd


def _send(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)


def _wait(job: RunningJob, pidfd: int | None, *, is_now: bool) -> None:
    """Wait until nothing of JOB is left, and print how it ended."""
    if pidfd is not None:
        # A second signal makes a launcher kill at once; two pending signals would be one.
        while not select.select([pidfd], [], [], _AGAIN_S if is_now else None)[0]:
            _send(pidfd)
        os.close(pidfd)
    elif job.launcher is None:
        # Its launcher and its guard, which would have done this, were killed.

        marker = f"{JOB}={job.name}".encode()
        if not jobprocesses.kill_all(marker, _SWEEP_S, 0):
            raise EnvironmentFault(
                f"stop: processes of {job.name} cannot be killed; look at `ps -e`."
            )
    name, end = ps.called(job.name, is_known=bool(jobs.about(job).job_id)), jobs.end(job)
    pid = "" if job.launcher is None else f" (process {job.launcher})"
    remark(f"{name}{pid} has ended: {end[1] if end else 'its launcher had been killed.'}")
