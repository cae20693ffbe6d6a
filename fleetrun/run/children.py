"""Child processes: start them, reap them, and kill those that outlive their rank.

The guard and the launcher above it are child subreapers: a descendant whose parent dies becomes a
child of the nearest of them. Only direct children are killed, in rounds: no other process can reap
them, so their ids cannot be reused.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, NamedTuple

from fleetrun.run import libc, proc
from fleetrun.run.loop import poll

_KILL = 9
# A process still alive after this waits for a device; by then there may be new children.
_ROUND_S = 0.05
# The name of the guard process, as `ps` shows it.
GUARD = "rank-guard"
# The longest time between fork and exec.
_EXEC_S = 5.0
_LOOK_S = 0.005


class Order(NamedTuple):
    """A process to start, in the terms of `posix_spawnp`."""

    argv: tuple[str, ...]
    env: Mapping[bytes, bytes]
    # The descriptors of its output files, in the process that starts it.
    output: int
    errors: int
    takes_our_stdin: bool
    default_signals: Sequence[int]
    # CPU affinity; empty: unrestricted.
    cpus: Sequence[int]
    # The process group to join in order to read the terminal; 0: lead a new session.
    group: int = 0


class WaitStatus(NamedTuple):
    """How a process ended, as `waitid` reports it."""

    code: int
    status: int


WELL = WaitStatus(os.CLD_EXITED, 0)


class Leftover(NamedTuple):
    """A process that outlived its rank and was killed."""

    pid: int
    argv: tuple[str, ...]


class Ended(NamedTuple):
    """A reaped process: its status, peak memory, and the leftovers of its process group."""

    status: WaitStatus
    # None: unknown.
    peak_bytes: int | None
    left: tuple[Leftover, ...] = ()


class Swept(NamedTuple):
    """The processes that outlived their ranks: `ended` were killed, `stuck` survived SIGKILL."""

    stuck: tuple[int, ...]
    ended: tuple[Leftover, ...]


def become_subreaper() -> None:
    """Become the parent of every descendant whose parent dies."""
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the ids of this process's children, zombies included."""
    try:
        # Most often it is asked whether any is left: this says so sooner than a file does.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    try:
        # As bytes: the codec of a text file costs an import at the end of each launch.
        with open("/proc/thread-self/children", "rb", buffering=0) as file:
            return list(map(int, file.readall().split()))
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
    session: dict[str, Any] = {"setpgroup": order.group} if order.group else {}
    # Ctrl-\\ asks the launcher for stacks; it must not end processes in the same group.
    quit_handler = signal.signal(signal.SIGQUIT, signal.SIG_IGN) if order.group else None
    defaults = set(order.default_signals) - ({signal.SIGQUIT} if order.group else set())
    try:
        return os.posix_spawnp(
            order.argv[0],
            order.argv,
            order.env,
            file_actions=actions,
            setsid=not order.group,
            setsigmask=(),
            setsigdef=defaults,
            **session,
        )
    finally:
        if quit_handler is not None:
            signal.signal(signal.SIGQUIT, quit_handler)
        _move_to(before)


def adopted(order: Order) -> int | None:
    """Return the process that the dead guard started for ORDER, now our child; None if none.

    It is recognised by its environment, which no other rank shares.
    """
    expected = sorted(b"%s=%s" % pair for pair in order.env.items())
    deadline = time.monotonic() + _EXEC_S
    while time.monotonic() < deadline:
        environs = {pid: proc.content(f"/proc/{pid}/environ") for pid in children()}
        matches = [
            pid
            for pid, env in environs.items()
            if sorted(env.rstrip(b"\0").split(b"\0")) == expected
        ]
        if matches:
            # Its own children, which we may have adopted too, are younger.
            return min(matches, key=_birth)
        # Between fork and exec, a child still carries the guard's name.
        if not any(proc.command(pid).startswith(GUARD) for pid in environs):
            return None
        poll(_LOOK_S)
    return None


def _birth(pid: int) -> int:
    stat = proc.stat(pid)
    return 0 if stat is None else stat.started


def _move_to(cpus: Collection[int]) -> Collection[int]:
    """Bind this thread to CPUS unless empty, and return the previous affinity.

    A process started meanwhile inherits the affinity, so it never runs elsewhere.
    """
    if not cpus:
        return ()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        # The CPUs have gone away since planning: start the process unbound.
        return ()
    return before


def wait_status(pid: int) -> WaitStatus:
    """Return the status of PID, a child that has ended, and leave it a zombie."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    return WaitStatus(result.si_code, result.si_status)


def wait_statuses(pids: Iterable[int]) -> list[WaitStatus]:
    """Return the statuses of PIDS, which have ended, up to the first that has failed."""
    statuses = []
    for pid in pids:
        statuses.append(wait_status(pid))
        if statuses[-1] != WELL:
            break
    return statuses


def end(pids: Sequence[int], statuses: Sequence[WaitStatus] = ()) -> list[Ended]:
    """Reap PIDS, children that have ended, and kill what is left of their process groups.

    With one look at all children; up to the first that has failed. STATUSES: theirs, if known.
    """
    statuses = statuses or wait_statuses(pids)
    ended = list(zip(pids, statuses, strict=False))
    well = {pid for pid, status in ended if status == WELL}
    members = list(_members(well)) if well else []
    return [_end(pid, status, members if status == WELL else ()) for pid, status in ended]


def _end(pid: int, status: WaitStatus, members: Iterable[tuple[int, int]]) -> Ended:
    left = tuple(Leftover(member, proc.argv(member)) for group, member in members if group == pid)
    # The zombie still pins the group id.
    with suppress(ProcessLookupError, PermissionError):
        # A set-user-id program may not be signalled.
        os.killpg(pid, _KILL)
    try:
        usage = os.wait4(pid, 0)[2]
    except ChildProcessError:
        return Ended(status, None, left)
    # The kernel counts in KiB.
    return Ended(status, usage.ru_maxrss * 1024, left)


def alone(pids: Sequence[int]) -> dict[int, WaitStatus]:
    """Return the statuses of those of PIDS, all ended, whose groups have no living member."""
    groups = {group for group, _ in _members(set(pids))}
    return {pid: wait_status(pid) for pid in pids if pid not in groups}


def left_in(group: int) -> int | None:
    """Return a living member of GROUP, whose leader has ended; None if there is none."""
    # Orphans are our children now. SIGTERM kills a wrapper shell, while the Python that it runs
    # still saves a checkpoint.
    return next((member for _, member in _members((group,))), None)


def _members(leaders: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield the living children in the groups of LEADERS, except these: group and process."""
    for pid in children():
        group = _group(pid)
        if group and group in leaders and pid != group and not _reap_if_ended(pid):
            yield group, pid


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _reap_if_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None


def signal_groups(leaders: Collection[int], signum: int = _KILL) -> None:
    """Send SIGNUM to the children LEADERS and their process groups; reap none."""
    for pid in leaders:
        with suppress(ProcessLookupError, PermissionError):
            # The process that reads the terminal leads no group.
            (os.killpg if _group(pid) == pid else os.kill)(pid, signum)


class EndRequest:
    """A request to end, made to the process group of LEADER, or to its MEMBERS where it has none.

    A DataLoader that loses a worker raises, and its process can no longer save. So whatever a
    Python has started is asked only when that Python has ended, or at last by `insist`.
    """

    def __init__(self, leader: int, members: Callable[[], list[proc.Stat]] | None = None) -> None:
        self._leader = leader
        self._members = members
        self._signum: int = signal.SIGTERM
        # When each of those who have been asked was started, and whether all have been.
        self._asked: dict[int, int] = {}
        self._is_complete = False

    def make(self, signum: int) -> None:
        """Send SIGNUM to all that no Python has started; again only if it differs."""
        if signum != self._signum:
            self._asked.clear()
            self._is_complete = False
        self._signum = signum
        self.repeat()

    def repeat(self) -> None:
        """Ask those that have not been asked, as the Python that has started them has ended."""
        if self._is_complete:
            # Those that they have started since help them to end.
            return
        leader = proc.stat(self._leader)
        if leader is not None and proc.is_python(self._leader):
            self._ask([leader])
            return
        members = self._all()
        first = _tops(members)
        if len(first) == len(members) and not self._asked and self._members is None:
            # At once: a shell that loses what it waits for may end before it is asked itself.
            signal_groups([self._leader], self._signum)
            self._asked = {member.pid: member.started for member in members}
        else:
            self._ask(first)
        self._is_complete = len(first) == len(members)

    def insist(self) -> None:
        """Ask all that have not been asked."""
        self._ask(self._all())

    def notify(self, signum: int) -> None:
        """Send the notice SIGNUM to the rank, and to no wrapper that it would end."""
        first = _tops(self._all())
        for member in first:
            if len(first) == 1 or proc.catches(member.pid, signum):
                with suppress(OSError):
                    proc.send(member, signum)

    def _all(self) -> list[proc.Stat]:
        """Return the living members, the oldest first."""
        if self._members is not None:
            members = self._members()
        else:
            members = [member for member in proc.all_processes() if member.group == self._leader]
        return sorted(members, key=lambda member: (member.started, member.pid))

    def _ask(self, members: Iterable[proc.Stat]) -> None:
        for member in members:
            if self._asked.get(member.pid) != member.started:
                self._asked[member.pid] = member.started
                # Gone already, or a set-user-id program.
                with suppress(OSError):
                    proc.send(member, self._signum)


def _tops(members: Collection[proc.Stat]) -> list[proc.Stat]:
    """Return those of MEMBERS that do not descend from a Python among them."""
    pythons = {member.pid for member in members if proc.is_python(member.pid)}
    started = {member.pid for member in members if member.parent in pythons}
    below = proc.descendants(members, started)
    return [member for member in members if member.pid not in below]


def any_left(leaders: Collection[int]) -> bool:
    """Whether any of LEADERS or their process groups is alive; reap no leader."""
    return any(_is_alive(pid) or left_in(pid) is not None for pid in leaders)


def _is_alive(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def kill(leaders: AbstractSet[int], seconds: float) -> None:
    """Kill all children of the guard, LEADERS first; reap no leader."""
    deadline = time.monotonic() + seconds
    signal_groups(leaders)
    while any(map(_is_alive, leaders)) and time.monotonic() < deadline:
        poll(_LOOK_S)
    # Their descendants in other sessions are our children now.
    sweep(leaders, max(0.0, deadline - time.monotonic()), is_guard=True)


def sweep(spare: AbstractSet[int], seconds: float, *, is_guard: bool = False) -> Swept:
    """Kill every descendant except SPARE, for at most SECONDS.

    All children of the guard belong to the job; of the launcher's (not IS_GUARD), not all do.
    """
    deadline = time.monotonic() + seconds
    leftovers: dict[int, Leftover] = {}
    while True:
        targets = [
            pid for pid in children() if pid not in spare and (is_guard or not _is_ours(pid))
        ]
        if not targets or time.monotonic() >= deadline:
            return Swept(tuple(targets), tuple(left for left in leftovers.values() if left.argv))
        for pid in targets:
            left = Leftover(pid, proc.argv(pid))
            try:
                os.kill(pid, _KILL)
            except ProcessLookupError:
                # The kernel has reaped it already if SIGCHLD was inherited as ignored.
                continue
            except PermissionError:
                # A set-user-id program.
                spare |= {pid}
                continue
            leftovers.setdefault(pid, left)
        until = min(deadline, time.monotonic() + _ROUND_S)
        for pid in targets:
            _reap(pid, until)


def _is_ours(pid: int) -> bool:
    """Whether PID is in the launcher's own session, where no process of the job can be.

    Such a child may come from the shell that `exec`ed the launcher, or may be an abandoned call
    that a stuck driver holds.
    """
    try:
        return os.getsid(pid) == os.getsid(0)
    except OSError:
        return False


def _reap(pid: int, deadline: float) -> None:
    """Reap PID if it ends by DEADLINE."""
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
