"""Checks of disk space, limits, clock and libraries of this host; each reads and judges."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import psutil

from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.host import files
from fleetrun.run import proc
from fleetrun.text import counted, format_size

_MIB, _GIB = 1 << 20, 1 << 30
# Docker's default is 64 MiB, in which the workers of one DataLoader die of SIGBUS.
_TIGHT, _FULL = 1 * _GIB, 16 * _MIB
_FEW_INODES = 1000
# A rank may have some hundreds of open files: libraries, sockets to each peer, data.
FILES_PER_RANK = 256
# The threads of a rank: Paddle, BLAS and data loaders.
_THREADS_PER_RANK, _BASE_THREADS = 64, 128
# A rank of Paddle's CPU build takes 400 MiB after the import.
MEMORY_PER_RANK = 512 * _MIB
# Synchronised clocks and a network folder do not explain more.
_CLOCK_S = 1.0
# More than file systems reserve for small files, and cheap on a network file system.
_TRIED_BYTES = 65536
# Without a limit, memory.limit_in_bytes is near 2**63.
_UNLIMITED = 1 << 62
# adjtimex(2): the bit of `status` which means that nothing disciplines the clock, its offset in
# struct timex on 64 bits, and more than the size of that.
_STA_UNSYNC, _STATUS_AT, _TIMEX_BYTES = 0x40, 40, 256


def check(
    log_dir: str, *, ranks: int, has_peers: bool, has_rdma: bool, root: str = "/"
) -> Iterator[Finding]:
    """Yield the findings for RANKS processes; LOG_DIR need not exist yet."""
    group = control_group(root)
    folder = os.path.abspath(log_dir)
    while not os.path.isdir(folder) and folder != "/":
        folder = os.path.dirname(folder)
    yield shared_memory(os.path.join(root, "dev/shm"))
    yield logs(folder)
    yield openmp()
    yield open_files(ranks)
    yield processes(ranks, group)
    yield from memory_limits(has_rdma=has_rdma)
    yield memory(ranks, group)
    yield cpus(ranks, group)
    yield clock(folder, has_peers=has_peers)


def shared_memory(folder: str) -> Finding:
    """Check the space for shared memory."""
    name = "shared memory"
    means = "DataLoader workers and NCCL exchange data there, and die of SIGBUS when it is full"
    fix = (
        "ls -l /dev/shm  # remove what is left over; `mount -o remount,size=16G /dev/shm`, "
        "or in Docker --shm-size=16g"
    )
    room = _room(folder)
    seen = f"{folder} has {format_size(room.free)} free of {format_size(room.total)}"
    refusal = _refusal(folder)
    if refusal:
        return error(name, f"{folder} cannot be written ({refusal}; {seen})", means, fix)
    if room.free < _FULL:
        return error(name, seen, means, fix)
    return warning(name, seen, means, fix) if room.free < _TIGHT else ok(name, seen)


def logs(folder: str) -> Finding:
    """Check the space for logs."""
    name, fix = "disk for logs", f"df -h {folder}  # make room, or give another --log_dir"
    room = _room(folder)
    seen = f"{folder} has {format_size(room.free)} free of {format_size(room.total)}"
    refusal = _refusal(folder)
    if refusal:
        means = "no rank could write its log"
        return error(name, f"{folder} cannot be written ({refusal})", means, fix)
    if room.free < _FULL:
        return error(name, seen, "the logs of the ranks will be cut off soon", fix)
    if room.inodes is not None and room.inodes < _FEW_INODES:
        few = f"{folder} has room for {room.inodes} more files"
        return warning(name, few, "new logs and checkpoints will soon fail", f"df -i {folder}")
    if room.free < _TIGHT:
        return warning(name, seen, "logs and checkpoints may not fit", fix)
    return ok(name, seen)


class Room(NamedTuple):
    """The bytes and the inodes of a file system; None: it does not count these."""

    total: int
    free: int
    inodes: int | None


def _room(folder: str) -> Room:
    """Return the room of the file system of FOLDER; none if it cannot be asked."""
    try:
        asked = os.statvfs(folder)
    except OSError:
        return Room(0, 0, None)
    inodes = asked.f_favail if asked.f_files else None
    return Room(asked.f_blocks * asked.f_frsize, asked.f_bavail * asked.f_frsize, inodes)


def _refusal(folder: str) -> str:
    """Return why FOLDER cannot be written; writing alone reveals quotas and read-only mounts."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0" * _TRIED_BYTES)
            os.fsync(file.fileno())
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def openmp(library: str = "libgomp.so.1") -> Finding:
    """Check GCC's OpenMP library, which Paddle needs."""
    try:
        ctypes.CDLL(library)
    except OSError as failure:
        return error(
            "OpenMP",
            f"{library} cannot be loaded ({failure})",
            "`import paddle` fails without it",
            "apt-get install libgomp1  # or dnf install libgomp",
        )
    return ok("OpenMP", f"{library} can be loaded")


def open_files(ranks: int) -> Finding:
    """Check the limit of open files, which ranks inherit."""
    name = "open files"
    soft, hard = _limits(resource.RLIMIT_NOFILE)
    raised = f", and may be raised to {_shown(hard)}" * (hard != soft)
    seen = f"`ulimit -n` is {_shown(soft)}{raised}"
    if soft is not None and soft < FILES_PER_RANK:
        means = f"a rank may need {FILES_PER_RANK}: libraries, sockets to its peers, its data"
        return warning(name, seen, means, "ulimit -n 65536")
    if hard is not None and hard < FILES_PER_RANK + 8 * ranks:
        means = f"fleetrun itself needs some for {counted(ranks, 'rank')}"
        return error(name, seen, means, "ulimit -Hn 65536  # by root; or in limits.conf")
    return ok(name, seen)


def processes(ranks: int, group: ControlGroup) -> Finding:
    """Check the limits of processes and threads."""
    name, needed = "processes", _BASE_THREADS + _THREADS_PER_RANK * ranks
    who = counted(ranks, "rank")
    means = f"{who} may have {needed} threads; one that cannot start ends the job"
    if group.processes is not None and group.processes - group.processes_used < needed:
        return warning(
            name,
            f"the control group allows {group.processes}, of which {group.processes_used} run",
            means,
            "docker run --pids-limit=-1 ...  # or pids.max of the group",
        )
    soft, hard = _limits(resource.RLIMIT_NPROC)
    # It does not hold root.
    if os.geteuid() and soft is not None:
        own = psutil.process_iter(["uids", "num_threads"])
        rows = [process.info for process in own]
        threads = sum(row["num_threads"] or 0 for row in rows if row["uids"].real == os.getuid())
        if soft - threads < needed:
            seen = f"`ulimit -u` is {soft} (at most {_shown(hard)}), and {threads} threads run"
            return warning(name, seen, means, "ulimit -u unlimited")
    return ok(name, f"room for the {needed} threads that {who} may have")


def memory_limits(*, has_rdma: bool) -> Iterator[Finding]:
    """Check the limits of address space and locked memory."""
    virtual, _ = _limits(resource.RLIMIT_AS)
    if virtual is not None:
        yield warning(
            "address space",
            f"`ulimit -v` is {format_size(virtual)}",
            "CUDA reserves more address space than a GPU has memory; ranks may die silently",
            "ulimit -v unlimited",
        )
    locked, _ = _limits(resource.RLIMIT_MEMLOCK)
    if has_rdma and locked is not None and locked < _GIB:
        yield warning(
            "locked memory",
            f"`ulimit -l` is {format_size(locked)}",
            "InfiniBand needs memory that stays where it is: NCCL fails, or uses slow sockets",
            "ulimit -l unlimited  # in Docker --ulimit memlock=-1",
        )


def _limits(which: int) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit WHICH of this process; None: unlimited."""
    soft, hard = resource.getrlimit(which)
    infinite = resource.RLIM_INFINITY
    return None if soft == infinite else soft, None if hard == infinite else hard


def _shown(number: int | None) -> str:
    return "unlimited" if number is None else str(number)


def memory(ranks: int, group: ControlGroup) -> Finding:
    """Check the memory of this host, or of the control group."""
    if group.memory is None:
        free = psutil.virtual_memory().total
        seen = f"this host has {format_size(free)}"
    else:
        free = group.memory - group.memory_used
        sizes = format_size(group.memory), format_size(max(free, 0))
        seen = "the control group has {}, of which {} is free".format(*sizes)
    if group.kills:
        seen += f"; the kernel has killed {group.kills} of its processes"
    fix = "docker run --memory=...  # or memory.max; or fewer ranks: --nproc_per_node"
    needed = ranks * MEMORY_PER_RANK
    if free < needed:
        means = f"{counted(ranks, 'rank')} may take {format_size(needed)} before they load anything"
        return warning("memory", seen, means, fix)
    if group.kills:
        return warning("memory", seen, "the memory of the control group has been too small", fix)
    return ok("memory", seen)


def cpus(ranks: int, group: ControlGroup) -> Finding:
    """Check the number of CPUs that may be used."""
    usable: float = len(os.sched_getaffinity(0))
    seen = f"{usable} may be used"
    if group.cpus is not None and group.cpus < usable:
        usable = group.cpus
        seen += f", {usable:g} of them at a time (control group)"
    if usable < ranks:
        return warning(
            "CPUs",
            seen,
            f"{counted(ranks, 'rank')} share them, so each is slow",
            "docker run --cpus=...  # or cpu.max, taskset; or fewer ranks: --nproc_per_node",
        )
    return ok("CPUs", seen)


def clock(folder: str, *, has_peers: bool) -> Finding:
    """Compare our clock with that of the file system of FOLDER, and ask whether it is set."""
    ahead_s = 0.0
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            before = time.time()
            file.write(b"\0")
            stamp, after = os.fstat(file.fileno()).st_mtime, time.time()
    except OSError:
        pass  # that is a finding of its own
    else:
        # File systems count time in steps of some milliseconds.
        ahead_s = max(before - stamp, 0.0) - max(stamp - after, 0.0)
    if abs(ahead_s) > _CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        return warning(
            "clock",
            f"ours is {abs(ahead_s):.1f} s {side} that of the file system of {folder}",
            "times in logs contradict each other, and what is new may look old",
            "chronyc tracking; chronyc makestep  # or timedatectl set-ntp true",
        )
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    is_known = ctypes.sizeof(ctypes.c_long) == 8 and ctypes.CDLL(None).adjtimex(buffer) >= 0
    status = int.from_bytes(buffer.raw[_STATUS_AT : _STATUS_AT + 4], "little")
    if not is_known:
        return ok("clock", "whether it is synchronised is unknown")
    if not status & _STA_UNSYNC:
        return ok("clock", "synchronised")
    if has_peers:
        return warning(
            "clock",
            "not synchronised (by the kernel's status)",
            "times of several hosts cannot be compared",
            "timedatectl set-ntp true  # or start chronyd",
        )
    return ok("clock", "not synchronised; that matters on several hosts only")


class ControlGroup(NamedTuple):
    """The tightest limits of our control group and those above it; None: none."""

    memory: int | None = None
    memory_used: int = 0
    # 1.5 is one and a half CPUs.
    cpus: float | None = None
    processes: int | None = None
    processes_used: int = 0
    # How many of its processes the out-of-memory killer has killed.
    kills: int = 0


def control_group(root: str) -> ControlGroup:
    """Return the limits of our control group, in either version."""
    memory: list[tuple[int, int]] = []
    cpus: list[float] = []
    processes: list[tuple[int, int]] = []
    kills = 0
    for folder in proc.cgroups(root=root):

        def number(*names: str, folder: str = folder) -> int | None:
            return _number(files.text(os.path.join(folder, name)) for name in names)

        limit = number("memory.max", "memory.limit_in_bytes")
        if limit is not None and limit < _UNLIMITED:
            memory.append((limit, number("memory.current", "memory.usage_in_bytes") or 0))
        most = number("pids.max")
        if most is not None:
            processes.append((most, number("pids.current") or 0))
        quota, period = number("cpu.max", "cpu.cfs_quota_us"), number("cpu.cfs_period_us")
        words = files.text(os.path.join(folder, "cpu.max")).split()
        if len(words) == 2 and words[1].isdigit():  # quota and period
            period = int(words[1])
        if quota is not None and quota > 0 and period:
            cpus.append(quota / period)
        for events in ("memory.events", "memory.oom_control"):
            kills = max(kills, proc.counts(os.path.join(folder, events)).get("oom_kill", 0))
    limit, used = min(memory, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    most, running = min(processes, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    return ControlGroup(limit, used, min(cpus, default=None), most, running, kills)


def _number(texts: Iterable[str]) -> int | None:
    """Return the first number at the start of one of TEXTS; `max` does not count.

    >>> _number(["", "max 100000"]), _number(["", "-1"]), _number(["150000 100000"])
    (None, -1, 150000)
    """
    words = [text.split()[0] for text in texts if text.split()]
    return next((int(word) for word in words if word.lstrip("-").isdigit()), None)
