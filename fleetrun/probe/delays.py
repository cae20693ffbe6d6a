"""What keeps a process from running: other processes, limits of its cgroup, other machines."""

from __future__ import annotations

import os
import re

from fleetrun.conversion import numbers
from fleetrun.probe import files
from fleetrun.run import proc
from fleetrun.typehints import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_NS_PER_S = 1e9
_TICKS = os.sysconf("SC_CLK_TCK")
_ALLOWED = re.compile(r"^Cpus_allowed_list:\s*(\S+)", re.MULTILINE)
# Its place in a line of /proc/stat, after the name (proc(5)).
_STEAL = 8
# Its place in a line of /proc/PID/stat, after the name, from the state on.
_MAJOR_FAULTS = 9


class Delays(NamedTuple):
    """Seconds since the start of a process, or of its host; None: the kernel does not tell."""

    # The main thread on a processor, and ready to run but waiting for one.
    main_s: float | None
    queued_s: float | None
    # Held back by the limits of its cgroups.
    throttled_s: float
    # Taken by the hypervisor for others, on average over its processors.
    stolen_s: float | None
    # The processors it may use, as the kernel lists them: `0-3,8`.
    processors: str
    # How often the main thread has waited for a page of memory from a disk.
    major_faults: int | None


def of(pid: int, stolen: Mapping[int, float], root: str = "/") -> Delays:
    """Return the delays of process PID, where STOLEN has the seconds of each processor."""
    folder = os.path.join(root, "proc", str(pid))
    # Of the main thread alone.
    task = os.path.join(folder, "task", str(pid))
    words = files.text(os.path.join(task, "schedstat")).split()
    main_ns, queued_ns = map(int, words[:2]) if len(words) > 1 else (None, None)
    match = _ALLOWED.search(files.text(os.path.join(folder, "status")))
    processors = match[1] if match else ""
    fields = files.text(os.path.join(task, "stat")).rpartition(")")[2].split()
    own = [stolen[number] for number in numbers(processors) if number in stolen]
    return Delays(
        main_s=None if main_ns is None else main_ns / _NS_PER_S,
        queued_s=None if queued_ns is None else queued_ns / _NS_PER_S,
        throttled_s=_throttled_s(pid, root),
        stolen_s=sum(own) / len(own) if own else None,
        processors=processors,
        major_faults=int(fields[_MAJOR_FAULTS]) if len(fields) > _MAJOR_FAULTS else None,
    )


def _throttled_s(pid: int, root: str) -> float:
    total = 0.0
    for folder in proc.cgroups(pid, root):
        counts = proc.counts(os.path.join(folder, "cpu.stat"))
        # Version 2 counts in microseconds, version 1 in nanoseconds.
        total += counts.get("throttled_usec", 0) / 1e6 + counts.get("throttled_time", 0) / 1e9
    return total


def stolen(root: str = "/") -> dict[int, float]:
    """Return by processor the seconds for which the hypervisor ran something else."""
    rows = [line.split() for line in files.text(os.path.join(root, "proc/stat")).splitlines()]
    return {
        int(words[0][3:]): int(words[_STEAL]) / _TICKS
        for words in rows
        if words and words[0].startswith("cpu") and words[0] != "cpu" and len(words) > _STEAL
    }
