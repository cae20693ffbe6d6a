"""Disk space, limits, clock and libraries of this host, for a check-up."""

# pathlib offers nothing more here, and paths arrive as texts.

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable

import psutil

from fleetrun.doctor.facts import CgroupLimits, ClockOffset, Machine, ResourceLimits, Room
from fleetrun.probe import files
from fleetrun.run import proc

# More than file systems reserve for small files, and cheap on a network file system.
_TRIED_BYTES = 65536
# Without a limit, memory.limit_in_bytes is near 2**63.
_UNLIMITED = 1 << 62
# adjtimex(2): this bit of `status` means that nothing disciplines the clock.
_STA_UNSYNC = 0x40
# Offset of `status` in struct timex, after modes, offset, freq, maxerror and esterror, which are
# longs but for the first, and the size of it all (208 on 64 bits).
_STATUS_AT, _TIMEX_BYTES = 40, 256


def read(log_dir: str, *, root: str = "/") -> Machine:
    """Return the resources of this host; LOG_DIR need not exist yet."""
    logs, ahead_s = _room(_existing(log_dir))
    shm, _ = _room(os.path.join(root, "dev/shm"))
    return Machine(
        shm=shm,
        logs=logs,
        limits=limits(),
        group=group(root),
        clock=ClockOffset(
            ahead_s or 0.0, logs.path if ahead_s is not None else "", _is_synchronised()
        ),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        libgomp=libgomp(),
    )


def _existing(path: str) -> str:
    """Return PATH or its nearest existing parent folder."""
    path = os.path.abspath(path)
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _room(path: str) -> tuple[Room, float | None]:
    """Return the file system of the folder PATH, and by how many seconds our clock is ahead of its.

    Only writing a temporary file reveals quotas and read-only mounts.
    """
    try:
        reported = os.statvfs(path)
    except OSError as error:
        return Room(path, 0, 0, None, error.strerror or str(error)), None
    refusal, ahead_s = "", None
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            before = time.time()
            file.write(b"\0" * _TRIED_BYTES)
            os.fsync(file.fileno())
            stamp = os.fstat(file.fileno()).st_mtime
            after = time.time()
    except OSError as error:
        refusal = error.strerror or str(error)
    else:
        # File systems count time in steps of some milliseconds.
        ahead_s = max(before - stamp, 0.0) - max(stamp - after, 0.0)
    room = Room(
        path=path,
        total=reported.f_blocks * reported.f_frsize,
        free=reported.f_bavail * reported.f_frsize,
        inodes=reported.f_favail if reported.f_files else None,
        refusal=refusal,
    )
    return room, ahead_s


def limits() -> ResourceLimits:
    """Return the limits of this process, which ranks inherit."""

    def pair(which: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(which)
        return _finite(soft), _finite(hard)

    def _finite(number: int) -> int | None:
        return None if number == resource.RLIM_INFINITY else number

    return ResourceLimits(
        open_files=pair(resource.RLIMIT_NOFILE),
        processes=pair(resource.RLIMIT_NPROC),
        locked_bytes=pair(resource.RLIMIT_MEMLOCK),
        virtual_bytes=pair(resource.RLIMIT_AS),
        threads=_threads(os.getuid()),
        is_root=os.geteuid() == 0,
    )


def _threads(uid: int) -> int:
    """Count the threads of user UID."""
    count = 0
    for pid in proc.pids():
        rows = proc.rows(pid, "status")
        if rows.get("Uid", "").split()[:1] == [str(uid)]:
            count += int(rows.get("Threads", "0"))
    return count


def group(root: str) -> CgroupLimits:
    """Return the tightest limits of our cgroup and those above it, in either version."""
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
    return CgroupLimits(limit, used, min(cpus, default=None), most, running, kills)


def _number(texts: Iterable[str]) -> int | None:
    """Return the first number at the start of one of TEXTS; `max` does not count.

    >>> _number(["", "max 100000"]), _number(["", "-1"]), _number(["150000 100000"])
    (None, -1, 150000)
    """
    for text in texts:
        word = text.split()[0] if text.split() else ""
        if word.lstrip("-").isdigit():
            return int(word)
    return None


def _is_synchronised() -> bool | None:
    """Whether the kernel's clock is disciplined; None if unknown."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    libc = ctypes.CDLL(None)
    if ctypes.sizeof(ctypes.c_long) != 8 or libc.adjtimex(buffer) < 0:  # 64 bits
        return None
    status = int.from_bytes(buffer.raw[_STATUS_AT : _STATUS_AT + 4], "little")
    return not status & _STA_UNSYNC


def libgomp(load: Callable[[str], object] | None = None) -> str:
    """Return why GCC's OpenMP library, which Paddle needs, cannot be loaded; empty if it can."""
    try:
        (load or ctypes.CDLL)("libgomp.so.1")
    except OSError as error:
        return str(error)
    return ""
