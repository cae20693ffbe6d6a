"""Finding all processes of a job in /proc, by the marker in their environment, and killing them.

This also finds processes that do not descend from the guard.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from fleetrun.run import proc
from fleetrun.run.loop import poll

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Set as AbstractSet

_PAUSE_S = 0.005


def kill_all(marker: bytes, seconds: float, shared: int) -> bool:
    """Kill every process of the job until none is left; return whether none is left in time.

    The process group SHARED also has processes of others, so it is never killed as a group.
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
    """Return the processes of the job, after those with the marker were killed at once.

    The newest come first: a process that forks and exits all the time (a "hopper") has a new
    number by the time that older ones are read.
    """
    # A process that dies with its group before it is read may have had children, whose parent
    # would not be known then.
    before = _all_processes()
    seen: list[proc.Stat] = []
    marked: set[int] = set()
    groups: set[int] = set()
    for process in _all_processes():
        seen.append(process)
        if b"\0" + marker + b"\0" in b"\0" + proc.content(f"/proc/{process.pid}/environ"):
            marked.add(process.pid)
            groups.add(process.group)
            if process.group != shared:
                _kill_group(process.group)
    return of_job(seen, before, marked, groups - {shared})


def of_job(
    seen: Collection[proc.Stat],
    before: Collection[proc.Stat],
    marked: AbstractSet[int],
    groups: AbstractSet[int],
) -> list[proc.Stat]:
    """Return the processes of the job but us: MARKED ones, and their descendants.

    Of those that were there BEFORE they were SEEN, members of the GROUPS of marked ones count, too.
    """
    processes = [*seen, *before]
    roots = marked | {process.pid for process in before if process.group in groups}
    found = roots | proc.descendants(processes, roots)
    by_pid = {process.pid: process for process in processes if process.pid in found}
    return [process for pid, process in by_pid.items() if pid != os.getpid()]


def _all_processes() -> list[proc.Stat]:
    """Return all processes, those with the highest ids first, which are usually the newest."""
    seen = map(proc.stat, sorted(proc.pids(), reverse=True))
    return [one for one in seen if one is not None]


def _kill_group(group: int) -> None:
    """Kill the process GROUP of a marked process, which a fork cannot escape.

    The group is the job's own: each rank leads a session, and a group never spans sessions. The
    exception is the rank that reads the launcher's terminal.
    """
    if group not in {0, os.getpgrp()}:
        # Gone already, or only a set-user-id program is left.
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
