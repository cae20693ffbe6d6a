"""The jobs that run on this host as this user, found in /proc, as there is no list of them.

A launcher holds the lock of its run directory open; the processes that it has started have
FLEETRUN_JOB in their environment, which no child can remove. Either is enough to find a job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from fleetrun.run import proc
from fleetrun.rundir import lockfile, names, runs
from fleetrun.rundir.variables import JOB, RUN_DIR

# Of the largest process id, 4194304 (PID_MAX_LIMIT in linux/threads.h).
_PID_DIGITS = 7


class RunningJob(NamedTuple):
    """A job: `name` is that of its run directory.

    `launcher` is the process that supervises it; None: it was killed, and processes that it had
    started still run. `processes` are these, with their descendants.
    """

    name: str
    run_dir: str
    launcher: int | None
    processes: tuple[int, ...]


class JobRecords(NamedTuple):
    """What the records of a job tell; fields are empty until they are written."""

    job_id: str = ""
    mode: str = ""
    nodes: tuple[str, ...] = ()
    node_rank: int = 0
    cwd: str = ""
    # Of the first process.
    argv: tuple[str, ...] = ()
    # Seconds since 1970.
    started: float | None = None
    # The number of processes planned for this host, and the current attempt, from 0.
    wanted: int = 0
    attempt: int = 0


def find() -> tuple[RunningJob, ...]:
    """Return the jobs of this user on this host, the oldest first."""
    launchers: dict[str, list[int]] = {}
    marked: dict[str, list[int]] = {}
    folders: dict[str, str] = {}
    for pid in _own():
        held = _held(pid)
        if held is not None:
            name = names.run_name(held)
            launchers.setdefault(name, []).append(_launcher(pid, held))
            folders[name] = held
        environ = _environ(pid)
        name = environ.get(JOB, "")
        if name and held is None:
            marked.setdefault(name, []).append(pid)
            folders.setdefault(name, environ.get(RUN_DIR, ""))
    return tuple(
        RunningJob(
            name, folders[name], _first(launchers.get(name, ())), tuple(marked.get(name, ()))
        )
        for name in sorted(folders)
    )


def about(job: RunningJob) -> JobRecords:
    """Return what the records of JOB tell."""
    # The plan is written a moment after the start, and never by the head of a job by ssh.
    shown = running(job)[:1] or (() if job.launcher is None else (job.launcher,))
    run = runs.read(job.run_dir)
    cwd = ""
    with suppress(OSError):
        cwd = "" if job.launcher is None else os.readlink(f"/proc/{job.launcher}/cwd")
    records = JobRecords(
        job_id=run.job_id,
        argv=tuple(map(proc.command, shown)),
        cwd=cwd,
        started=run.started_at,
        wanted=run.processes,
        attempt=run.attempt,
    )
    plan = run.plan
    if plan is None:
        return records
    return records._replace(
        job_id=plan.job_id,
        mode=plan.mode,
        nodes=plan.nodes,
        node_rank=plan.node_rank,
        cwd=plan.cwd,
        argv=plan.processes[0].argv if plan.processes else (),
    )


def end(job: RunningJob) -> tuple[int, str] | None:
    """Return the exit code and the verdict with which JOB has ended; None if not recorded."""
    run = runs.read(job.run_dir)
    return None if run.exit_code is None else (run.exit_code, run.verdict)


def running(job: RunningJob) -> tuple[int, ...]:
    """Return the processes that the launcher of JOB itself has started: ranks, servers."""
    leaders = tuple(pid for pid in job.processes if _is_leader(pid, job))
    # What a rank leaves behind leads a session, too. In another pid namespace the numbers differ.
    started = {log.pid for log in runs.read(job.run_dir).logs}
    return tuple(pid for pid in leaders if pid in started) or leaders


def named(jobs: Sequence[RunningJob], word: str) -> tuple[RunningJob, ...]:
    """Return those of JOBS that match WORD: a process id, a job's id, a name or its beginning.

    `train` is any job of that name; `20250102T030405Z-train-4711` is one.
    """
    exact = tuple(job for job in jobs if word in {job.name, str(job.launcher)})
    if exact:
        return exact
    # Names begin with the year, and 2026 may be the process of a job that has ended long ago.
    is_pid = word.isdecimal() and len(word) <= _PID_DIGITS
    return tuple(
        job
        for job in jobs
        if word
        and (
            word in {names.job_name(job.name), about(job).job_id}
            or (not is_pid and job.name.startswith(word))
        )
    )


def _own() -> Iterator[int]:
    """Yield the living processes of our user, without this one."""
    user, here = os.geteuid(), os.getpid()
    for pid in proc.pids():
        with suppress(FileNotFoundError):
            if pid != here and os.stat(f"/proc/{pid}").st_uid == user:
                yield pid


def _launcher(holder: int, run_dir: str) -> int:
    """Return the process that the user has started: HOLDER of the lock of RUN_DIR, or its parent.

    A supervisor holds it, unless its keeper was killed.
    """
    parent = proc.stat(holder)
    if parent is not None and parent.parent == lockfile.launcher_of(run_dir):
        return parent.parent
    return holder


def _held(pid: int) -> str | None:
    """Return the run directory whose lock PID holds."""
    if not proc.is_python(pid):
        return None
    for _, path in proc.open_files(pid):
        if os.path.basename(path) == names.LOCK:
            run_dir = os.path.dirname(path)
            above = run_dir
            if names.is_node_folder(os.path.basename(run_dir)):
                above = os.path.dirname(run_dir)
            if os.path.basename(os.path.dirname(above)) == names.RUNS:
                return run_dir
    return None


def _environ(pid: int) -> dict[str, str]:
    """Return those variables of PID's initial environment that identify its job."""
    pairs = proc.content(f"/proc/{pid}/environ").decode(errors="surrogateescape").split("\0")
    split = (pair.partition("=") for pair in pairs)
    return {name: value for name, _, value in split if name in {JOB, RUN_DIR}}


def _first(holders: Sequence[int]) -> int | None:
    """Return the one of HOLDERS that the others descend from; the guard is its child."""
    family = set(holders)
    for pid in holders:
        stat = proc.stat(pid)
        if stat is not None and stat.parent not in family:
            return pid
    return None


def _is_leader(pid: int, job: RunningJob) -> bool:
    """Whether no process of JOB has started PID."""
    stat = proc.stat(pid)
    return stat is not None and stat.parent not in job.processes and stat.session in {pid, 0}
