"""Finds forked children that wait for locks which no thread can release."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fleetrun.run import proc

if TYPE_CHECKING:
    from collections.abc import Iterable

# The number of the system call futex.
_FUTEX = {"x86_64": 202, "aarch64": 98}
# From linux/futex.h: FUTEX_WAIT and FUTEX_WAIT_BITSET, and the flag of locks within a process.
_WAITS = frozenset((0, 9))
_PRIVATE = 128
_CLOCK_REALTIME = 256
# Processes with more threads are not examined.
_MOST_THREADS = 512


def forked(family: Iterable[proc.Stat]) -> list[int]:
    """Return the deadlocked processes of FAMILY that are forks of another member of it."""
    # The oldest first, as far as ids tell.
    members = sorted(family)
    pids = {process.pid for process in members}
    # A process that has replaced itself has another command line, and locks of its own.
    return [
        process.pid
        for process in members
        if process.parent in pids
        and proc.argv(process.pid) == proc.argv(process.parent)
        and is_deadlocked(process.pid)
    ]


def is_deadlocked(pid: int) -> bool:
    """Whether every thread of PID waits, without a timeout, for another one to wake it.

    This is certain, not a guess; False where the kernel does not report it.
    """
    folder = f"/proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return False
    return 0 < len(threads) <= _MOST_THREADS and all(
        waits_for_ever(proc.content(f"{folder}/{thread}/syscall"), os.uname().machine)
        for thread in threads
    )


def waits_for_ever(syscall: bytes, machine: str) -> bool:
    """Whether only threads of its own process can wake a thread with this line in /proc.

    >>> waits_for_ever(b"202 0x7f00 0x189 0x0 0x0 0x0 0xffffffff 0x7ffd 0x7f01", "x86_64")
    True
    >>> waits_for_ever(b"202 0x7f00 0x189 0x0 0x7ffe 0x0 0xffffffff 0x7ffd 0x7f01", "x86_64")
    False
    """
    words = syscall.split()
    # A running thread has the single word `running`; another user's is not readable.
    if len(words) < 5 or words[0] != b"%d" % _FUTEX.get(machine, -1):
        return False
    operation, timeout = int(words[2], 16) & ~_CLOCK_REALTIME, int(words[4], 16)
    is_private = bool(operation & _PRIVATE)
    return is_private and operation & ~_PRIVATE in _WAITS and timeout == 0
