"""Find the processes of a job in /proc by the marker in their environment, and kill them.

This also finds processes that do not descend from the guard.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from contextlib import suppress

from fleetrun.run import proc
from fleetrun.run.loop import poll

_PAUSE_S = 0.005


def kill_all(marker: bytes, seconds: float, shared: int) -> bool:
    """Kill every process of the job, for at most SECONDS; return whether none is left.

    The process group SHARED is never killed as a group: it has unrelated processes, too.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        targets = _scan(marker, shared)
        if not targets:
            return True
        for process in targets:
            # Gone already, or a set-user-id program.
            with suppress(OSError):
                proc.send(process, signal.SIGKILL)
        poll(_PAUSE_S)
    return False


def _scan(marker: bytes, shared: int) -> list[proc.Stat]:
    """Kill the process groups of processes with the marker, and return all processes of the job.

    The newest are read first: a process that forks and exits all the time has a new id by the time
    that older ones have been read.
    """
    # A process that dies with its group before it is read below may have had children, whose
    # parent would then be unknown.
    before = proc.all_processes()
    processes: list[proc.Stat] = []
    marked: set[int] = set()
    groups: set[int] = set()
    for process in proc.all_processes():
        processes.append(process)
        if b"\0" + marker + b"\0" in b"\0" + proc.content(f"/proc/{process.pid}/environ"):
            marked.add(process.pid)
            groups.add(process.group)
            if process.group != shared:
                _kill_group(process.group)
    return of_job(processes, before, marked, groups - {shared})


def of_job(
    current: Collection[proc.Stat],
    before: Collection[proc.Stat],
    marked: AbstractSet[int],
    groups: AbstractSet[int],
) -> list[proc.Stat]:
    """Return the processes of the job, without this one: MARKED ones and their descendants.

    Of BEFORE, a list made earlier than CURRENT, members of the marked processes' GROUPS count, too.
    """
    processes = [*current, *before]
    roots = marked | {process.pid for process in before if process.group in groups}
    family = roots | proc.descendants(processes, roots)
    by_pid = {process.pid: process for process in processes if process.pid in family}
    return [process for pid, process in by_pid.items() if pid != os.getpid()]


def _kill_group(group: int) -> None:
    """Kill the process GROUP of a marked process, which no fork escapes.

    The group belongs to the job, since each rank leads a session and no group spans sessions,
    except that of the rank that reads the launcher's terminal.
    """
    if group not in {0, os.getpgrp()}:
        # Gone already, or only a set-user-id program is left.
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
