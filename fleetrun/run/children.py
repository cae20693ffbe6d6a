"""Child processes: starting them, reaping them, killing those that outlive their rank.

The guard is a child subreaper, and so is the launcher above it: a descendant whose parent dies
becomes a child of the nearest one. Only direct children are killed, round after round: no other
process can reap them, so their ids cannot be reused.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from fleetrun.namedtuples import NamedTuple
from fleetrun.run import libc, proc
from fleetrun.run.loop import poll

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

_KILL = 9
# A process that is not dead by then waits for a device; new children may have come meanwhile.
_ROUND_S = 0.05
# The name of the guard process, as `ps` shows it.
GUARD = "rank-guard"
# How long a process may take from its fork until it runs its program.
_EXEC_S = 5.0
_LOOK_S = 0.005


class Order(NamedTuple):
    """A process to be started, as `posix_spawnp` wants it."""

    argv: tuple[str, ...]
    env: Mapping[bytes, bytes]
    # The descriptors of its output files, in the process that starts it.
    output: int
    errors: int
    takes_our_stdin: bool
    default_signals: Sequence[int]
    # The processors that it may run on; empty: all.
    cpus: Sequence[int]
    # The process group of this session that it joins to read the terminal; 0: it leads a session.
    group: int = 0
    # Whether the fork server, if there is one, may fork it.
    may_fork: bool = False


class Launched(NamedTuple):
    """A process that was started; if it was to be forked and was not, `why_not` says why."""

    pid: int
    is_forked: bool = False
    why_not: str = ""


class WaitStatus(NamedTuple):
    """How a process ended, as `waitid` reports it."""

    code: int
    status: int


class Leftover(NamedTuple):
    """A process that outlived its rank and was killed."""

    pid: int
    argv: tuple[str, ...]


class Ended(NamedTuple):
    """A reaped process: its status, peak memory, and what was left in its process group."""

    status: WaitStatus
    # None: unknown.
    peak_bytes: int | None
    left: tuple[Leftover, ...] = ()


class Swept(NamedTuple):
    """The processes that outlived their ranks: killed ones, and ones that SIGKILL did not end."""

    stuck: tuple[int, ...]
    ended: tuple[Leftover, ...]


def become_subreaper() -> None:
    """Become the parent of every descendant whose parent dies."""
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the ids of this process's children, zombies included."""
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        # A kernel without CONFIG_PROC_CHILDREN.
        us = b"%d" % os.getpid()
        return [pid for pid in proc.pids() if proc.fields(pid)[1:2] == [us]]


def start(order: Order) -> int:
    """Start a process and return its id; raises OSError or ValueError."""
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_DUP2, order.output, 1),
        (os.POSIX_SPAWN_DUP2, order.errors, 2),
    ]
    if not order.takes_our_stdin:
        actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    before = _move_to(order.cpus)
    joins: dict[str, Any] = {"setpgroup": order.group} if order.group else {}
    # Ctrl-\\ asks the launcher for stacks; it must not end processes in the same group.
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
    """Return the process of ORDER that the dead guard had started, now a child of ours, if any.

    It is found by its environment, which no other rank shares.
    """
    wanted = sorted(b"%s=%s" % pair for pair in order.env.items())
    deadline = time.monotonic() + _EXEC_S
    while time.monotonic() < deadline:
        seen = {pid: proc.content(f"/proc/{pid}/environ") for pid in children()}
        found = [
            pid for pid, env in seen.items() if sorted(env.rstrip(b"\0").split(b"\0")) == wanted
        ]
        if found:
            # Its children, which may be ours by now, are younger.
            return min(found, key=_birth)
        # A child between fork and exec still looks like the one that made it.
        if not any(proc.command(pid).startswith(GUARD) for pid in seen):
            return None
        poll(_LOOK_S)
    return None


def _birth(pid: int) -> int:
    one = proc.stat(pid)
    return 0 if one is None else one.started


def _move_to(cpus: Collection[int]) -> Collection[int]:
    """Set the affinity of this thread to CPUS, if there are any, and return the previous one.

    A process started meanwhile inherits it, so it never runs on another processor.
    """
    if not cpus:
        return ()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        # They were taken away since the plan was made: start the process unbound.
        return ()
    return before


def wait_status(pid: int) -> WaitStatus:
    """Return how the child PID, which has ended, ended; it stays a zombie."""
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert seen is not None
    return WaitStatus(seen.si_code, seen.si_status)


def end(pid: int, how: WaitStatus | None = None) -> Ended:
    """Reap the child PID, which has ended (if known: HOW), and kill what is left of its group."""
    how = how or wait_status(pid)
    left: tuple[Leftover, ...] = ()
    if how == (os.CLD_EXITED, 0):
        left = tuple(Leftover(one, proc.argv(one)) for one in _members(pid))
    # The zombie still pins the group id.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # A set-user-id program may not be signalled.
        os.killpg(pid, _KILL)
    try:
        usage = os.wait4(pid, 0)[2]
    except ChildProcessError:
        return Ended(how, None, left)
    # The kernel counts in KiB.
    return Ended(how, usage.ru_maxrss * 1024, left)


def left_in(group: int) -> int | None:
    """Return a member of GROUP that outlives its leader, which has ended."""
    # Orphans are children of ours now. A wrapper shell dies of the SIGTERM on which the Python in
    # it saves its checkpoint.
    return next(iter(_members(group)), None)


def _members(group: int) -> Iterator[int]:
    """Return the living children that are in GROUP, except its leader."""
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


def signal_groups(leaders: Collection[int], signum: int = _KILL) -> None:
    """Send SIGNUM to the children LEADERS with their process groups, but reap none."""
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # One that reads the terminal leads no group.
            (os.killpg if _group(pid) == pid else os.kill)(pid, signum)


def any_left(leaders: Collection[int]) -> bool:
    """Whether one of the children LEADERS lives, or a process of its group; it reaps no leader."""
    return any(_is_alive(pid) or left_in(pid) is not None for pid in leaders)


def _is_alive(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def kill(leaders: AbstractSet[int], seconds: float) -> None:
    """Kill the guard's children LEADERS and all their descendants; reap no leader."""
    deadline = time.monotonic() + seconds
    signal_groups(leaders)
    while any(map(_is_alive, leaders)) and time.monotonic() < deadline:
        poll(_LOOK_S)
    # Those in other sessions are our children now.
    sweep(leaders, max(0.0, deadline - time.monotonic()), is_guard=True)


def sweep(spare: AbstractSet[int], seconds: float, *, is_guard: bool = False) -> Swept:
    """Kill every descendant except SPARE; some may not die within SECONDS.

    IS_GUARD: this is the guard, all of whose children belong to the job.
    """
    deadline = time.monotonic() + seconds
    ended: dict[int, Leftover] = {}
    while True:
        found = [pid for pid in children() if pid not in spare and (is_guard or not _is_ours(pid))]
        if not found or time.monotonic() >= deadline:
            return Swept(tuple(found), tuple(one for one in ended.values() if one.argv))
        for pid in found:
            ended.setdefault(pid, Leftover(pid, proc.argv(pid)))
        untouchable = [pid for pid in found if not kill_child(pid)]
        if untouchable:
            from fleetrun.run import cgroup

            cgroup.kill(untouchable)
        until = min(deadline, time.monotonic() + _ROUND_S)
        for pid in found:
            _reap(pid, until)


def _is_ours(pid: int) -> bool:
    """Whether PID is in the launcher's own session, where no process of the job can be.

    The launcher may have been a shell before it was `exec`ed, with children in the background; or
    PID is an abandoned child that a stuck driver keeps.
    """
    try:
        return os.getsid(pid) == os.getsid(0)
    except OSError:
        return False


def kill_child(pid: int) -> bool:
    """Kill the child PID; False without permission, as for a set-user-id program."""
    # What runs only when nobody else wants the processor, as a fork server that imports, also dies
    # only then: on a busy host after minutes.
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
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
            poll(deadline - time.monotonic(), pidfd)
        finally:
            os.close(pidfd)
        _reap_if_ended(pid)
    except (ChildProcessError, ProcessLookupError):
        return


def reap_orphans(spare: AbstractSet[int]) -> None:
    """Reap the children that have ended, except SPARE."""
    for pid in children():
        if pid not in spare:
            try:
                _reap_if_ended(pid)
            except ChildProcessError:
                continue
