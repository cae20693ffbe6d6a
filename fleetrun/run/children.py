"""The children of this process, among them every descendant whose parent has died.

Only children are signalled by their ids: until this process reaps one, its id is nobody else's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Set as AbstractSet

# How often to look for more.
_ROUND_S = 0.05


def pids(parent: int | None = None) -> list[int]:
    """Return the ids of all children, zombies included, of this process or of PARENT.

    The list is complete if the parent reaps none meanwhile.
    """
    task = f"{parent}/task/{parent}" if parent else "thread-self"
    # As bytes: the codec of a text file costs an import at the end of each launch.
    with open(f"/proc/{task}/children", "rb", buffering=0) as file:
        return list(map(int, file.readall().split()))


def group(pid: int) -> int | None:
    """Return the process group of PID; None if it has gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def reap(pid: int) -> bool:
    """Reap the child PID if it has ended; return whether it is gone."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def is_helper(pid: int) -> bool:
    """Whether the child PID does not belong to the job: those that ask a driver, or measure."""
    return group(pid) == os.getpgrp()


def send(pid: int, signum: int) -> bool:
    """Send SIGNUM to the child PID, and to the group that it leads; return whether it may be."""
    return send_one(-pid if group(pid) == pid else pid, signum)


def send_one(pid: int, signum: int) -> bool:
    """Send SIGNUM to PID alone; return whether a set-user-id program does not forbid that."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def sweep(
    spared: AbstractSet[int],
    *,
    grace_s: float = 0.0,
    stuck_s: float = 5.0,
    hurried_by: AbstractSet[int] = frozenset(),
) -> None:
    """End all descendants but SPARED children: TERM, and KILL after GRACE_S seconds.

    In rounds, until none is found: even one that has ended has handed its children to us. Gives up
    on those that KILL does not end in STUCK_S. One of the signals HURRIED_BY, which are blocked,
    ends the grace.
    """
    asked: set[int] = set()
    kill_at = time.monotonic() + grace_s
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        while living := [pid for pid in pids() if pid not in spared]:
            left = [pid for pid in living if not reap(pid)]
            if not left:
                continue
            now = time.monotonic()
            if now > kill_at + stuck_s:
                return
            for pid in left:
                if now >= kill_at or pid not in asked:
                    asked.add(pid)
                    if not send(pid, signal.SIGKILL if now >= kill_at else signal.SIGTERM):
                        spared = spared | {pid}
            wait_s = kill_at - now if now < kill_at else _ROUND_S
            info = signal.sigtimedwait({signal.SIGCHLD, *hurried_by}, wait_s)
            if info is not None and info.si_signo in hurried_by:
                kill_at = min(kill_at, time.monotonic())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
