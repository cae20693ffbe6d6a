"""What the kernel knows about a failure: its log and counters, shared memory, a core file.

What is not readable is left out; nothing here raises.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from fleetrun.run import proc
from fleetrun.run.events import Exited
from fleetrun.text import format_size

# The files of a cgroup that count kills, and that limit memory, in versions 2 and 1.
_MEMORY = (
    ("memory.events", "memory.max"),
    ("memory.oom_control", "memory.limit_in_bytes"),
)
# A limit of about this size means none (the kernel rounds it to pages).
_NO_LIMIT = 1 << 60
# With less room, a traceback does not fit into a log.
_LITTLE = 4096
# The longest record of the kernel's log.
_RECORD = 8192


class Baseline(NamedTuple):
    """The count of out-of-memory kills in our cgroup when the job began, if the kernel tells it."""

    # Monotonic, in seconds.
    at: float
    oom_kills: int | None = None


class Cgroup(NamedTuple):
    """The memory counters of this launcher's cgroup; the limit in bytes, if there is one."""

    file: str
    oom_kills: int
    limit: int | None


def baseline(at: float) -> Baseline:
    """Return the count now, for a job that began at AT."""
    group = cgroup()
    return Baseline(at, group.oom_kills if group else None)


def of(culprit: Exited, before: Baseline) -> list[str]:
    """Explain in full sentences why a signal has killed CULPRIT."""
    signum = culprit.status.signum
    group = cgroup() if signum == signal.SIGKILL else None
    facts = [] if signum is None else _recorded(culprit.pid, before, group)
    if signum == signal.SIGKILL:
        if not facts and group is not None and group.oom_kills == before.oom_kills:
            facts.append(
                "The kernel has counted no out-of-memory kill since the start, so look for another "
                "sender: a scheduler, systemd-oomd, a user's kill -9."
            )
        total = format_size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        peak, limit = culprit.peak_bytes, group.limit if group else None
        its = f"Its peak memory use was {format_size(peak)}; this" if peak else "This"
        own = f", our cgroup may use {format_size(limit)}" if limit else ""
        facts.append(f"{its} host has {total}{own}.")
    if signum == signal.SIGBUS:
        facts += shared_memory()
    if culprit.has_core:
        pattern = proc.content("/proc/sys/kernel/core_pattern").decode(errors="replace").strip()
        facts.append(f"It left a core (kernel.core_pattern is {pattern}).")
    return facts


def _recorded(pid: int | None, before: Baseline, group: Cgroup | None) -> list[str]:
    """Say what the kernel has recorded of PID, and in its GROUP if SIGKILL has ended that."""
    try:
        lines = [] if pid is None else about(records(), pid, before.at)
    except OSError:
        lines = []
    facts = [f"The kernel's log says: {line}" for line in lines[-2:]]
    if any("Killed process" in line for line in facts):
        facts.insert(0, "The kernel's out-of-memory killer did it.")
    elif group is not None and group.oom_kills > (before.oom_kills or 0):
        facts.append(
            "The kernel's out-of-memory killer did it: its count for our cgroup rose from "
            f"{before.oom_kills} to {group.oom_kills} ({group.file})."
        )
    return facts


def about(log: Iterable[bytes], pid: int, since: float) -> list[str]:
    """Return the lines of LOG, in the form of /dev/kmsg, about the end of PID."""
    lines = []
    marks = (f"Killed process {pid} ", f"[{pid}]: segfault", f"[{pid}] trap ", f"[{pid}]: bad ")
    for record in log:
        header, _, message = record.partition(b";")
        fields = header.split(b",")
        line = message.split(b"\n", 1)[0].decode(errors="replace")
        is_new = len(fields) > 2 and fields[2].isdigit() and int(fields[2]) / 1e6 >= since
        if is_new and any(mark in line for mark in marks):
            lines.append(line)
    return lines


def records(path: str = "/dev/kmsg") -> Iterator[bytes]:
    """Yield the records of the kernel's log; raises OSError if it may not be read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # BlockingIOError: the end, for now.
    with open(fd, "rb", buffering=0), suppress(BlockingIOError):
        for _ in range(20_000):
            # The oldest records may be overwritten while we read; continue with the next.
            with suppress(BrokenPipeError):
                record = os.read(fd, _RECORD)
                if not record:
                    return
                yield record


def cgroup(root: str = "/") -> Cgroup | None:
    """Return the state of our cgroup, in version 2 or 1; None if none is visible."""
    for folder in proc.cgroups(root):
        for events, limit in _MEMORY:
            oom_kills = proc.counts(f"{folder}/{events}").get("oom_kill")
            if oom_kills is not None:
                most = proc.content(f"{folder}/{limit}").strip()
                is_limit = most.isdigit() and int(most) < _NO_LIMIT
                return Cgroup(f"{folder}/{events}", oom_kills, int(most) if is_limit else None)
    return None


def full_disk(log: str) -> list[str]:
    """Return the remark that the disk of LOG is full: a rank could not write why it failed."""
    folder = os.path.dirname(log)
    try:
        room = os.statvfs(folder)
    except OSError:
        return []
    is_full = room.f_blocks and room.f_bavail * room.f_frsize < _LITTLE
    return [f"The disk of {folder} is full, so its last lines may be missing."] if is_full else []


def shared_memory(path: str = "/dev/shm") -> list[str]:  # noqa: S108 - only measured
    """Return how large shared memory is, and how much of it is in use."""
    try:
        room = os.statvfs(path)
    except OSError:
        return [f"There is no {path}."]
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    used = format_size(total - free)
    return [f"{path} has {format_size(total)}, of which {used} are in use now."]
