"""Finding all processes of a job in /proc, by the marker in their environment, and killing them.

This also finds processes that do not descend from the guard.
"""

import os
import select
import signal
import time
from typing import NamedTuple

from fleetrun.run import proc

_PAUSE_MS = 5


class ProcessEntry(NamedTuple):
    """What /proc says about one process."""

    pid: int
    parent: int
    group: int
    session: int
    started: int
    is_marked: bool


def of_job(
    processes: list[ProcessEntry], leaders: frozenset[int], spare: frozenset[int]
) -> list[ProcessEntry]:
    """Return the processes of the job: marked, in a session of LEADERS, or descendants of such."""
    found = {p.pid: p for p in processes if p.is_marked or p.session in leaders}
    grown = True
    while grown:
        more = {p.pid: p for p in processes if p.parent in found and p.pid not in found}
        found |= more
        grown = bool(more)
    return [process for pid, process in found.items() if pid not in spare]


def kill_all(marker: bytes, leaders: frozenset[int], seconds: float, shared: int) -> bool:
    """Kill every process of the job until none is left; return whether none is left in time.

    The process group SHARED also has processes of others, so it is never killed as a group.
    """
    deadline = time.monotonic() + seconds
    spare = frozenset((os.getpid(),))
    pause = select.poll()
    while time.monotonic() < deadline:
        targets = of_job(_scan(marker, shared), leaders, spare)
        if not targets:
            return True
        for process in targets:
            _kill(process)
        pause.poll(_PAUSE_MS)
    return False


def _scan(marker: bytes, shared: int) -> list[ProcessEntry]:
    """Read every living process from /proc, and kill those with the marker at once.

    The newest come first: a process that forks and exits all the time (a "hopper") has a new
    number by the time that older ones are read.
    """
    # A process that dies with its group before it is read may have had children, whose parent
    # would not be known then.
    before = [one for pid in _pids() if (one := _read_process(pid, b"")) is not None]
    seen = []
    for pid in _pids():
        process = _read_process(pid, marker)
        if process is not None:
            seen.append(process)
            if process.is_marked and process.group != shared:
                _kill_group(process)
    groups = {process.group for process in seen if process.is_marked} - {shared}
    return [*seen, *(one._replace(is_marked=one.group in groups) for one in before)]


def _pids() -> list[int]:
    """Return all process ids, the highest first, which are usually the newest."""
    return sorted(proc.pids(), reverse=True)


def _kill_group(process: ProcessEntry) -> None:
    """Kill the process group of a marked process, which a fork cannot escape.

    The group is the job's own: each rank leads a session, and a group never spans sessions. The
    exception is the rank that reads the launcher's terminal.
    """
    if process.group not in {0, os.getpgrp()}:
        try:
            os.killpg(process.group, signal.SIGKILL)
        except OSError:
            # Gone already, or only a set-user-id program is left.
            return


def _read_process(pid: int, marker: bytes) -> ProcessEntry | None:
    """Return the process PID, with its MARKER looked for unless that is empty; None: it is gone."""
    stat = proc.stat(pid)
    if stat is None:
        return None
    environ = b"\0" + proc.content(f"/proc/{pid}/environ") if marker else b""
    return ProcessEntry(
        pid=pid,
        parent=stat.parent,
        group=stat.group,
        session=stat.session,
        started=stat.started,
        is_marked=b"\0" + marker + b"\0" in environ,
    )


def _kill(process: ProcessEntry) -> None:
    """Kill exactly the process that was seen, not a later one with its number."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = _read_process(process.pid, b"")
        if now is not None and now.started == process.started:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(pidfd)
