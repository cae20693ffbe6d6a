"""Our own children: starting them, reaping them, killing what outlived its rank.

The guard is a child subreaper, and so is the launcher above it: a descendant whose parent dies
becomes a child of the nearest one. Only direct children are killed, round after round: nobody else
can reap them, so their ids cannot be reused.
"""

# pathlib costs start-up time.
# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetrun.run import libc, proc

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

_KILL = 9
# Who is not dead by then, waits for a device; others may have come in the meantime.
_ROUND_S = 0.05
# What a process of the launcher's that stands apart from it is called.
GUARD = "rank-guard"
# How long a process may take from its fork until it runs its program.
_EXEC_S = 5.0
_LOOK_MS = 5


class Order(NamedTuple):
    """A process to be started, as `posix_spawnp` wants it."""

    argv: tuple[str, ...]
    env: Mapping[bytes, bytes]
    # The file that its output goes to; only the process that starts it knows it by this number.
    output: int
    takes_our_stdin: bool
    default_signals: Sequence[int]
    # Where it may run; anywhere if there are none.
    cpus: Sequence[int]
    # The process group of our session that it joins to read the terminal; 0: it leads a session.
    group: int = 0


class Fate(NamedTuple):
    """How a process ended, as `waitid` tells it."""

    code: int
    status: int


class Left(NamedTuple):
    """A process that outlived its rank and was killed."""

    pid: int
    words: tuple[str, ...]


class Ended(NamedTuple):
    """A process that was reaped: its end, the most memory it had, who was left in its group."""

    fate: Fate
    # None if nobody was there to see.
    peak_bytes: int | None
    left: tuple[Left, ...] = ()


class Swept(NamedTuple):
    """What became of those that outlived their ranks: some not even SIGKILL ends."""

    stuck: tuple[int, ...]
    ended: tuple[Left, ...]


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
        us = b"%d" % os.getpid()
        return [pid for pid in proc.pids() if proc.fields(pid)[1:2] == [us]]


def start(order: Order) -> int:
    """Start a process and return its id; OSError or ValueError if that cannot be."""
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_DUP2, order.output, 1),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    if not order.takes_our_stdin:
        actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    before = _move_to(order.cpus)
    joins: dict[str, Any] = {"setpgroup": order.group} if order.group else {}
    # Ctrl-\\ asks the launcher for stacks; it must not end who is in the same group.
    quits = signal.signal(signal.SIGQUIT, signal.SIG_IGN) if order.group else None
    defaults = [one for one in order.default_signals if quits is None or one != signal.SIGQUIT]
    try:
        return os.posix_spawnp(
            order.argv[0],
            order.argv,
            order.env,
            file_actions=actions,
            setsid=not order.group,
            setsigmask=(),
            setsigdef=defaults,
            **joins,
        )
    finally:
        if quits is not None:
            signal.signal(signal.SIGQUIT, quits)
        _move_to(before)


def adopted(order: Order) -> int | None:
    """Return the process of ORDER that our dead child has started and left to us, if there is one.

    It is known by its environment, which is that of no other rank.
    """
    wanted = sorted(b"%s=%s" % pair for pair in order.env.items())
    deadline = time.monotonic() + _EXEC_S
    while time.monotonic() < deadline:
        seen = {pid: proc.content(f"/proc/{pid}/environ") for pid in children()}
        found = [
            pid for pid, env in seen.items() if sorted(env.rstrip(b"\0").split(b"\0")) == wanted
        ]
        if found:
            # Its own children, should they be ours already, are younger.
            return min(found, key=_birth)
        # A child between fork and exec still looks like the one that made it.
        if not any(proc.command(pid).startswith(GUARD) for pid in seen):
            return None
        select.poll().poll(_LOOK_MS)
    return None


def _birth(pid: int) -> int:
    one = proc.stat(pid)
    return 0 if one is None else one.started


def _move_to(cpus: Collection[int]) -> Collection[int]:
    """Move to CPUS, if any are named, and return where we could run before.

    What is started meanwhile inherits them, so not one of its instructions runs elsewhere.
    """
    if not cpus:
        return ()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        # They were taken from us since the plan was made: better unbound than not at all.
        return ()
    return before


def fate(pid: int) -> Fate:
    """Return how our child PID, which has ended, did; it stays a zombie."""
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert seen is not None  # noqa: S101 - only with WNOHANG
    return Fate(seen.si_code, seen.si_status)


def end(pid: int, how: Fate | None = None) -> Ended:
    """Reap our child PID, which has ended (if known: HOW), and kill what is left of its group."""
    how = how or fate(pid)
    left: tuple[Left, ...] = ()
    if how == (os.CLD_EXITED, 0):
        left = tuple(Left(one, proc.words(one)) for one in _members(pid))
    # The zombie still pins the group id.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # A set-user-id program is out of our reach.
        os.killpg(pid, _KILL)
    try:
        usage = os.wait4(pid, 0)[2]
    except ChildProcessError:
        return Ended(how, None, left)
    # The kernel counts in KiB.
    return Ended(how, usage.ru_maxrss * 1024, left)


def left_in(group: int) -> int | None:
    """Return a member of GROUP that outlives its leader, which has ended."""
    # The children of the dead are ours now. A wrapper shell dies of the TERM at which the Python
    # in it saves its checkpoint.
    return next(iter(_members(group)), None)


def _members(group: int) -> Iterator[int]:
    """Return our living children that are in GROUP, but its leader."""
    for pid in children():
        if pid != group and _group(pid) == group and not _reap_if_ended(pid):
            yield pid


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _reap_if_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None


def sweep(spare: AbstractSet[int], seconds: float, *, is_guard: bool = False) -> Swept:
    """Kill every descendant but SPARE; some may not die within SECONDS.

    Who has no children but the job's IS_GUARD.
    """
    deadline = time.monotonic() + seconds
    ended: dict[int, Left] = {}
    while True:
        doomed = [pid for pid in children() if pid not in spare and (is_guard or not _is_ours(pid))]
        if not doomed or time.monotonic() >= deadline:
            return Swept(tuple(doomed), tuple(one for one in ended.values() if one.words))
        for pid in doomed:
            ended.setdefault(pid, Left(pid, proc.words(pid)))
        untouchable = [pid for pid in doomed if not _kill(pid)]
        if untouchable:
            from fleetrun.run import cgroup  # noqa: PLC0415 - rare

            cgroup.kill(untouchable)
        until = min(deadline, time.monotonic() + _ROUND_S)
        for pid in doomed:
            _reap(pid, until)


def _is_ours(pid: int) -> bool:
    """Whether PID is in our own session, in which no process of the job can be.

    The launcher may have been a shell before it was `exec`ed, with children in the background; or
    it is a child that a stuck driver keeps, for which nobody waits.
    """
    try:
        return os.getsid(pid) == os.getsid(0)
    except OSError:
        return False


def _kill(pid: int) -> bool:
    """Kill our child PID; False if we may not, as with a set-user-id program."""
    try:
        os.kill(pid, _KILL)
    except ProcessLookupError:
        # Under a kernel that reaps for us (SIGCHLD inherited as ignored) it may be gone.
        return True
    except PermissionError:
        return False
    return True


def _reap(pid: int, deadline: float) -> None:
    """Wait for PID to end, and reap it if it does."""
    try:
        if _reap_if_ended(pid):
            return
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(pidfd)
        _reap_if_ended(pid)
    except (ChildProcessError, ProcessLookupError):
        return


def reap_orphans(spare: AbstractSet[int]) -> None:
    """Reap what has ended of our children, but SPARE."""
    for pid in children():
        if pid not in spare:
            try:
                _reap_if_ended(pid)
            except ChildProcessError:
                continue
