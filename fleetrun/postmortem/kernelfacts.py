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
from fleetrun.rundir.folder import Closing
from fleetrun.text import format_size, sentence

# The files of a cgroup that count kills, and that limit memory, in versions 2 and 1.
_MEMORY = (
    ("memory.events", "memory.max"),
    ("memory.oom_control", "memory.limit_in_bytes"),
)
# A limit of about this size means none (the kernel rounds it to pages).
_NO_LIMIT = 1 << 60
# One record of the kernel's log is never longer.
_RECORD = 8192
_MOST_RECORDS = 20_000


class Baseline(NamedTuple):
    """The counts of out-of-memory kills when the job began; None: not reported by the kernel."""

    # Monotonic, in seconds.
    at: float
    in_cgroup: int | None = None
    on_host: int | None = None


class Cgroup(NamedTuple):
    """The memory counters of this launcher's cgroup."""

    file: str
    oom_kills: int | None
    # In bytes; None: as much as there is.
    limit: int | None


def baseline(at: float) -> Baseline:
    """Return the counts now, for a job that began at AT."""
    group = cgroup()
    return Baseline(at, group.oom_kills if group else None, _kills_on_host())


def of(culprit: Exited, before: Baseline) -> list[str]:
    """Explain in full sentences why a signal has killed CULPRIT."""
    match culprit.status.signum:
        case signal.SIGKILL:
            facts = _of_kill(culprit, before)
        case signal.SIGBUS:
            facts = [*kernel_says(culprit.pid, before.at), *shared_memory()]
        case None:
            facts = []
        case _:
            facts = kernel_says(culprit.pid, before.at)
    return [*facts, *_core(culprit)] if culprit.has_core else facts


def of_child(pid: int, signum: int, before: Baseline) -> list[str]:
    """Say what the kernel has recorded of a rank's child PID that SIGNUM has killed."""
    if signum != signal.SIGKILL:
        return kernel_says(pid, before.at)
    return _out_of_memory(pid, before, cgroup())[0]


def _of_kill(culprit: Exited, before: Baseline) -> list[str]:
    """Say whether the out-of-memory killer did it, and how certain that is."""
    group = cgroup()
    facts, on_host = _out_of_memory(culprit.pid, before, group)
    if not facts and before.on_host is not None and on_host == before.on_host:
        facts.append(
            "The kernel has counted no out-of-memory kill since the start, so look for another "
            "sender: a scheduler, systemd-oomd, a user's kill -9."
        )
    return [*facts, _memory(culprit, group)]


def _out_of_memory(
    pid: int | None, before: Baseline, group: Cgroup | None
) -> tuple[list[str], int | None]:
    """Return the signs that the out-of-memory killer ended PID, and its count on this host."""
    in_cgroup = None if group is None else group.oom_kills
    on_host = _kills_on_host()
    facts = kernel_says(pid, before.at)
    if any("Killed process" in line for line in facts):
        facts.insert(0, "The kernel's out-of-memory killer did it.")
    elif group is not None and _rose(before.in_cgroup, in_cgroup):
        facts.append(
            "The kernel's out-of-memory killer did it: its count for our cgroup rose from "
            f"{before.in_cgroup} to {in_cgroup} ({group.file})."
        )
    elif _rose(before.on_host, on_host):
        facts.append(
            "The kernel's out-of-memory killer was active on this host then: its count rose "
            f"from {before.on_host} to {on_host} (/proc/vmstat)."
        )
    return facts, on_host


def _memory(culprit: Exited, group: Cgroup | None) -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    peak = (
        f"Its peak memory use was {format_size(culprit.peak_bytes)}; " if culprit.peak_bytes else ""
    )
    limit = f", our cgroup may use {format_size(group.limit)}" if group and group.limit else ""
    return sentence(f"{peak}this host has {format_size(total)}{limit}.")


def _rose(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


# The kernel --------------------------------------------------------------------------------------


def kernel_says(pid: int | None, since: float) -> list[str]:
    """Return the kernel's log lines about the end of PID, SINCE a monotonic time in seconds."""
    try:
        lines = [] if pid is None else about(records(), pid, since)
    except OSError:
        return []
    return [f"The kernel's log says: {line}" for line in lines[-2:]]


def about(log: Iterable[bytes], pid: int, since: float) -> list[str]:
    """Return the lines of LOG, in the form of /dev/kmsg, about the end of PID.

    >>> about([b"6,1,2000000,-;python[7]: segfault at 0 ip 1 error 4 in lib.so[2]"], 7, since=1.0)
    ['python[7]: segfault at 0 ip 1 error 4 in lib.so[2]']
    """
    lines = []
    for record in log:
        header, _, message = record.partition(b";")
        fields = header.split(b",")
        line = message.split(b"\n", 1)[0].decode(errors="replace")
        marks = (f"Killed process {pid} ", f"[{pid}]: segfault", f"[{pid}] trap ", f"[{pid}]: bad ")
        if len(fields) > 2 and fields[2].isdigit() and int(fields[2]) / 1e6 >= since:
            lines += [line] if any(mark in line for mark in marks) else []
    return lines


def records(path: str = "/dev/kmsg") -> Iterator[bytes]:
    """Yield the records of the kernel's log; raises OSError if it may not be read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(_MOST_RECORDS):
            # The oldest records may be overwritten while we read; continue with the next.
            with suppress(BrokenPipeError):
                record = os.read(fd, _RECORD)
                if not record:
                    return
                yield record
    except BlockingIOError:
        # The end, for now.
        return
    finally:
        os.close(fd)


def cgroup(root: str = "/") -> Cgroup | None:
    """Return the state of our cgroup, in version 2 or 1; None if none is visible."""
    for folder in proc.cgroups(root=root, of=("", "memory")):
        for events, limit in _MEMORY:
            oom_kills = proc.counts(f"{folder}/{events}").get("oom_kill")
            if oom_kills is not None:
                most = proc.content(f"{folder}/{limit}").strip()
                bound = int(most) if most.isdigit() else None
                real = bound if bound is not None and bound < _NO_LIMIT else None
                return Cgroup(f"{folder}/{events}", oom_kills, real)
    return None


def _kills_on_host() -> int | None:
    return proc.counts("/proc/vmstat").get("oom_kill")


# Memory and files --------------------------------------------------------------------------------


def shared_memory(path: str = "/dev/shm") -> list[str]:  # noqa: S108 - only measured
    """Return how large shared memory is, and how much of it is in use."""
    try:
        room = os.statvfs(path)
    except OSError:
        return [f"There is no {path}."]
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    return [
        f"{path} has {format_size(total)}, of which {format_size(total - free)} are in use now."
    ]


def unwritable(folder: str) -> list[str]:
    """Return why FOLDER cannot be written, if it cannot: the log would be incomplete then."""
    path = os.path.join(folder, f".room.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with Closing(fd := os.open(path, flags, 0o600)):
            os.unlink(path)
            os.write(fd, bytes(4096))
    except OSError as error:
        fault = f"Nothing can be written to {folder} ({error.strerror}): the last lines are not"
        return [f"{fault} in its log, and it may have failed while printing."]
    return []


def _core(culprit: Exited) -> list[str]:
    pattern = proc.content("/proc/sys/kernel/core_pattern").decode(errors="replace").rstrip("\n")
    if pattern.startswith("|"):
        handler = os.path.basename(pattern[1:].split(" ", 1)[0])
        if handler == "systemd-coredump":
            return [f"It left a core: coredumpctl info {culprit.pid}."]
        return [f"It left a core, which the system passed to {handler}."]
    return [f"It left a core (kernel.core_pattern is {pattern})."]
