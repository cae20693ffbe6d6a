"""Checks of disk space, limits and memory of this host."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import psutil

from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.host import files
from fleetrun.run import proc
from fleetrun.text import counted, format_size

_MIB, _GIB = 1 << 20, 1 << 30
# Docker's default is 64 MiB, in which the workers of one DataLoader die of SIGBUS.
_TIGHT, _FULL = 1 * _GIB, 16 * _MIB
_FEW_INODES = 1000
# A rank may have some hundreds of open files: libraries, sockets to each peer, data.
_FILES_PER_RANK = 256
# The threads of a rank: Paddle, BLAS and data loaders.
_THREADS_PER_RANK, _BASE_THREADS = 64, 128
# A rank of Paddle's CPU build takes 400 MiB after the import.
_MEMORY_PER_RANK = 512 * _MIB
# More than file systems reserve for small files, and cheap on a network file system.
_TRIED_BYTES = 65536
# Without a limit, memory.limit_in_bytes is near 2**63.
_UNLIMITED = 1 << 62


def shared_memory(_job: CheckedJob) -> Iterator[Finding]:
    """Check the space for shared memory."""
    means = "DataLoader workers and NCCL exchange data there, and die of SIGBUS when it is full"
    fix = (
        "ls -l /dev/shm  # remove what is left over; `mount -o remount,size=16G /dev/shm`, "
        "or in Docker --shm-size=16g"
    )
    yield _space("shared memory", "/dev/shm", means, means, fix)  # noqa: S108 - it is one


def logs(job: CheckedJob) -> Iterator[Finding]:
    """Check the space for logs, whose folder need not exist yet."""
    folder = _folder(job)
    full = "the logs of the ranks will be cut off soon"
    fix = f"df -h {folder}; df -i {folder}  # make room, or give another --log_dir"
    closed = ("a launch ends with 3", f"chmod u+w {folder}  # or give another --log_dir")
    yield _space(
        "disk for logs", folder, full, "logs and checkpoints may not fit", fix, closed=closed
    )


def _folder(job: CheckedJob) -> str:
    folder = os.path.abspath(job.request.log_dir)
    while not os.path.isdir(folder) and folder != "/":
        folder = os.path.dirname(folder)
    return folder


def _space(
    check: str,
    folder: str,
    full: str,
    tight: str,
    fix: str,
    *,
    closed: tuple[str, str] | None = None,
) -> Finding:
    """Judge the space of FOLDER; FULL and TIGHT say what little means.

    CLOSED is the meaning and the fix if nobody may write there.
    """
    try:
        room = os.statvfs(folder)
        free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        seen = f"{folder} has {format_size(free)} free of {format_size(total)}"
        # Writing alone reveals quotas and read-only mounts.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0" * _TRIED_BYTES)
            os.fsync(file.fileno())
    except OSError as failure:
        if closed is not None and failure.errno in {errno.EACCES, errno.EROFS}:
            full, fix = closed
        return error(check, f"{folder} cannot be written ({failure.strerror})", full, fix)
    if free < _FULL:
        return error(check, seen, full, fix)
    # Some file systems do not count their files.
    if room.f_files and room.f_favail < _FEW_INODES:
        return warning(check, f"{folder} has room for {room.f_favail} more files", tight, fix)
    return warning(check, seen, tight, fix) if free < _TIGHT else ok(check, seen)


def open_files(job: CheckedJob) -> Iterator[Finding]:
    """Check the limit of open files, which ranks inherit."""
    check, (soft, hard) = "open files", _limits(resource.RLIMIT_NOFILE)
    raised = f", and may be raised to {_shown(hard)}" if hard != soft else ""
    seen = f"`ulimit -n` is {_shown(soft)}{raised}"
    if soft < _FILES_PER_RANK:
        means = f"a rank may need {_FILES_PER_RANK}: libraries, sockets to its peers, its data"
        yield warning(check, seen, means, "ulimit -n 65536")
    elif hard < _FILES_PER_RANK + 8 * job.ranks:
        means = f"fleetrun itself needs some for {counted(job.ranks, 'rank')}"
        yield error(check, seen, means, "ulimit -Hn 65536  # by root; or in limits.conf")
    else:
        yield ok(check, seen)


def processes(job: CheckedJob, root: str = "/") -> Iterator[Finding]:
    """Check the limits of processes and threads."""
    check, group, needed = "processes", control_group(root), _BASE_THREADS + _THREADS_PER_RANK
    needed += _THREADS_PER_RANK * (job.ranks - 1)
    who = counted(job.ranks, "rank")
    means = f"{who} may have {needed} threads; one that cannot start ends the job"
    if group.processes is not None and group.processes - group.processes_used < needed:
        seen = f"the control group allows {group.processes}, of which {group.processes_used} run"
        fix = "docker run --pids-limit=-1 ...  # or pids.max of the group"
        yield warning(check, seen, means, fix)
        return
    soft, hard = _limits(resource.RLIMIT_NPROC)
    # It does not hold root.
    if os.geteuid() and soft < needed:
        seen = f"`ulimit -u` is {_shown(soft)} (at most {_shown(hard)})"
        yield warning(check, seen, means, "ulimit -u unlimited")
    else:
        yield ok(check, f"room for the {needed} threads that {who} may have")


def _limits(which: int) -> tuple[float, float]:
    """Return the soft and the hard limit WHICH of this process; infinite without one."""
    soft, hard = (
        float("inf") if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(which)
    )
    return soft, hard


def _shown(limit: float) -> str:
    return "unlimited" if limit == float("inf") else str(limit)


def memory(job: CheckedJob, root: str = "/") -> Iterator[Finding]:
    """Check the memory of this host, or of the control group."""
    group = control_group(root)
    free = psutil.virtual_memory().total
    seen = f"this host has {format_size(free)}"
    if group.memory is not None:
        free = max(group.memory - group.memory_used, 0)
        most = format_size(group.memory)
        seen = f"the control group has {most}, of which {format_size(free)} is free"
    fix = "docker run --memory=...  # or memory.max; or fewer ranks: --nproc_per_node"
    needed = job.ranks * _MEMORY_PER_RANK
    if free < needed:
        means = (
            f"{counted(job.ranks, 'rank')} may take {format_size(needed)} before they load anything"
        )
        yield warning("memory", seen, means, fix)
    else:
        yield ok("memory", seen)


class ControlGroup(NamedTuple):
    """The tightest limits of our control group and those above it; None: none."""

    memory: int | None = None
    memory_used: int = 0
    processes: int | None = None
    processes_used: int = 0


def control_group(root: str = "/") -> ControlGroup:
    """Return the limits of our control group, in either version."""
    memory: list[tuple[int, int]] = []
    processes: list[tuple[int, int]] = []
    for folder in proc.cgroups(root):
        for limits, limit_name, used_name in (
            (memory, "memory.max", "memory.current"),
            (memory, "memory.limit_in_bytes", "memory.usage_in_bytes"),
            (processes, "pids.max", "pids.current"),
        ):
            limit, used = (
                files.text(os.path.join(folder, name)).strip() for name in (limit_name, used_name)
            )
            # `max` stands for no limit.
            if limit.isdigit() and int(limit) < _UNLIMITED:
                limits.append((int(limit), int(used or 0)))
    least, used_bytes = min(memory, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    most, running = min(processes, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    return ControlGroup(least, used_bytes, most, running)
