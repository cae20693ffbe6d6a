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


class RunningJob(NamedTuple):
    """A job: `name` is that of its run directory.

    `launcher` is the process that supervises it; None: it was killed, and processes that it had
    started still run. `processes` are these, with their descendants.
    """

    name: str
    run_dir: str
    launcher: int | None
    processes: tuple[int, ...]


def find() -> tuple[RunningJob, ...]:
    """Return the jobs of this user on this host, the oldest first."""
    launchers: dict[str, int] = {}
    marked: dict[str, list[int]] = {}
    folders: dict[str, str] = {}
    for pid in _own():
        held = _held(pid)
        if held is not None:
            name = names.run_name(held)
            folders[name] = held
            # A supervisor holds the lock, and its guard; the user has started its parent.
            stat, keeper = proc.stat(pid), lockfile.launcher_of(held)
            if stat is not None and stat.parent == keeper:
                launchers[name] = stat.parent
            else:
                launchers.setdefault(name, pid)
            continue
        environ = _environ(pid)
        name = environ.get(JOB, "")
        if name:
            marked.setdefault(name, []).append(pid)
            folders.setdefault(name, environ.get(RUN_DIR, ""))
    return tuple(
        RunningJob(name, folders[name], launchers.get(name), tuple(marked.get(name, ())))
        for name in sorted(folders)
    )


def folder(job: RunningJob) -> str:
    """Return the folder that JOB was started in; empty if it is not known."""
    plan = runs.read(job.run_dir).plan
    if plan is not None:
        return plan.cwd
    # The plan is written a moment after the start, and never by the head of a job by ssh.
    with suppress(OSError):
        return "" if job.launcher is None else os.readlink(f"/proc/{job.launcher}/cwd")
    return ""


def running(job: RunningJob) -> tuple[int, ...]:
    """Return the processes that the launcher of JOB itself has started: ranks, servers."""
    started = {log.pid for log in runs.read(job.run_dir).logs}
    # In another pid namespace the numbers differ.
    return tuple(pid for pid in job.processes if pid in started) or job.processes


def named(jobs: Sequence[RunningJob], word: str) -> tuple[RunningJob, ...]:
    """Return those of JOBS that match WORD: a process id, a job's id, a name or its beginning.

    `train` is any job of that name; `20250102T030405Z-train-4711` is one.
    """
    exact = tuple(job for job in jobs if word in {job.name, str(job.launcher)})
    # Names begin with the year, and 2026 may be the process of a job that has ended long ago.
    is_beginning = not word.isdecimal()
    return exact or tuple(
        job
        for job in jobs
        if word
        and (
            word in {names.job_name(job.name), runs.read(job.run_dir).job_id}
            or (is_beginning and job.name.startswith(word))
        )
    )


def _own() -> Iterator[int]:
    """Yield the living processes of our user, without this one."""
    user, here = os.geteuid(), os.getpid()
    for pid in proc.pids():
        with suppress(FileNotFoundError):
            if pid != here and os.stat(f"/proc/{pid}").st_uid == user:
                yield pid


def _held(pid: int) -> str | None:
    """Return the run directory whose lock PID holds."""
    if not proc.is_python(pid):
        return None
    for _, path in proc.open_files(pid):
        if os.path.basename(path) == names.LOCK:
            run_dir = os.path.dirname(path)
            # A host of several has a folder of its own in that of the run.
            if names.RUNS in run_dir.split("/")[-3:-1]:
                return run_dir
    return None


def _environ(pid: int) -> dict[str, str]:
    """Return those variables of PID's initial environment that identify its job."""
    pairs = proc.content(f"/proc/{pid}/environ").decode(errors="surrogateescape").split("\0")
    split = (pair.partition("=") for pair in pairs)
    return {name: value for name, _, value in split if name in {JOB, RUN_DIR}}
