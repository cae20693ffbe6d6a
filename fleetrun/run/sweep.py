"""Killing what outlived its rank: grandchildren, daemons, `setsid` escapees.

The launcher is a child subreaper: a descendant whose parent dies becomes our child. Only direct
children are killed, round after round: nobody else can reap them, so their ids cannot be reused.
"""

# pathlib costs start-up time.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from fleetrun.run import libc

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

_KILL = 9


def become_subreaper() -> None:
    """Adopt every descendant that loses its parent."""
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the processes whose parent we are, zombies too."""
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        # A kernel without CONFIG_PROC_CHILDREN.
        us = str(os.getpid())
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == us]


def _parent(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in brackets may hold anything, a bracket too.
            return file.read().rpartition(b")")[2].split()[1].decode()
    except OSError:
        return ""


def sweep(spare: AbstractSet[int], seconds: float) -> list[int]:
    """Kill every descendant but SPARE and return those that did not die within SECONDS."""
    deadline = time.monotonic() + seconds
    while True:
        doomed = [pid for pid in children() if pid not in spare and not _is_ours(pid)]
        if not doomed:
            return []
        for pid in doomed:
            _signal(pid)
        reaped = [_reap(pid, deadline) for pid in doomed]
        if not all(reaped):
            return [pid for pid in children() if pid not in spare and not _is_ours(pid)]


def _is_ours(pid: int) -> bool:
    """Whether PID is in the launcher's own session, in which no process of the job can be.

    The launcher may have been a shell before it was `exec`ed, with children in the background; or
    it is a child that a stuck driver keeps, for which nobody waits.
    """
    try:
        return os.getsid(pid) == os.getsid(0)
    except OSError:
        return False


def _signal(pid: int) -> None:
    try:
        os.kill(pid, _KILL)
    except ProcessLookupError:
        # Under a kernel that reaps for us (SIGCHLD inherited as ignored) it may be gone.
        return
    except PermissionError:
        # A set-user-id program is out of our reach.
        return


def _reap(pid: int, deadline: float) -> bool:
    """Wait for PID to end; say whether it did."""
    try:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is None:
            pidfd = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            finally:
                os.close(pidfd)
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except (ChildProcessError, ProcessLookupError):
        return True
    return True


def reap_orphans(spare: AbstractSet[int]) -> bool:
    """Reap adopted children that ended; False if a child in SPARE ended and stands in the way."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        if ended is None:
            return True
        if ended.si_pid in spare:
            return False
        os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)
