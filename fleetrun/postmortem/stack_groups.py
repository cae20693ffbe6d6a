"""Reads dumped Python stacks, and finds the ranks that stand elsewhere than most."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

# A rank with one of these functions on its stack waits for others.
_MEETINGS = """
all_gather all_gather_object all_reduce all_reduce_ alltoall alltoall_single barrier broadcast
broadcast_object_list gather gloo_barrier irecv isend new_group recv reduce reduce_scatter
fused_allreduce_gradients init_parallel_env init_rpc scatter send stream_synchronize
"""
_MEETING = frozenset(_MEETINGS.split())
# Parts of Paddle, which need not be among the installed packages, that call collectives and wait.
_PARTS = "autograd base distributed framework hapi nn optimizer tensor"
# Code that the user did not write; the last is ours in a checkout.
_LIBRARIES = (
    *("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/fleetrun/inject/"),
    *(f"/paddle/{part}/" for part in _PARTS.split()),
)
# Our wrappers of Paddle's calls, which are in every stack.
_WRAPPERS = "flight_recorder border import_hooks store_wait gloo_stores"
_OURS = tuple(f"/inject/{name}.py" for name in _WRAPPERS.split())
_PROCESS = re.compile(r"# process (\d+): ")
_FRAME = re.compile(r'\s+File "(.+)", line (\d+) in (.+)')


class Frame(NamedTuple):
    """A function that is being run, and where in it."""

    function: str
    file: str
    line: int

    @property
    def is_users(self) -> bool:
        """Whether the user wrote it, as far as its path tells."""
        return not any(part in self.file for part in _LIBRARIES)

    def __str__(self) -> str:
        """Write FUNCTION (FILE:LINE), as people look for it."""
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


Stack = tuple[Frame, ...]


class StackGroup(NamedTuple):
    """Ranks on the same lines, and their common stack, innermost frame first."""

    ranks: tuple[int, ...]
    stack: Stack

    @property
    def is_meeting(self) -> bool:
        """Whether ranks wait for others here."""
        return any(frame.function.rpartition(".")[2] in _MEETING for frame in self.stack)

    def __str__(self) -> str:
        """Name the innermost function, and the user's own line from where it was reached."""
        if not self.stack:
            return "no Python code"
        inner = self.stack[0]
        users = next((frame for frame in self.stack if frame.is_users), inner)
        return str(inner) if users is inner else f"{inner}, called from {users}"


class StackComparison(NamedTuple):
    """All groups, the smallest first, and the ranks that do not stand where most do."""

    places: tuple[StackGroup, ...]
    odd: tuple[int, ...]


def of_processes(dump: str) -> dict[int, tuple[Stack, ...]]:
    """Return the stacks of all threads in a DUMP, by process; nothing of those without any."""
    threads: dict[int, list[list[Frame]]] = {}
    current: list[list[Frame]] = []
    for line in dump.splitlines():
        process, frame = _PROCESS.match(line), _FRAME.match(line)
        if process is not None:
            current = threads[int(process[1])] = []
        elif line.startswith(("Thread ", "Current thread ")):
            current.append([])
        elif current and frame is not None and not frame[1].endswith(_OURS):
            current[-1].append(Frame(frame[3], frame[1], int(frame[2])))
    return {pid: tuple(map(tuple, stacks)) for pid, stacks in threads.items() if stacks}


def main_thread(dump: str) -> Stack:
    """Return the stack of the main thread of the first process in DUMP that has any.

    What follows belongs to a child of the rank. faulthandler begins with the youngest thread.
    """
    return next((stacks[-1] for stacks in of_processes(dump).values()), ())


def users_line(stack: Stack) -> str:
    """Name the innermost line of the script in STACK: `data.py:88 (next)`."""
    frame = next((frame for frame in stack if frame.is_users), None)
    return (
        "" if frame is None else f"{frame.file.rpartition('/')[2]}:{frame.line} ({frame.function})"
    )


def compare(stacks: Mapping[int, Stack]) -> StackComparison:
    """Find the ranks that stand elsewhere than most.

    They are those that do not wait where most do; else those on other lines than most.
    """
    known = {rank: stack for rank, stack in stacks.items() if stack}
    places = _groups(known, lambda stack: stack)
    working = [place for place in places if not place.is_meeting]
    at_work = [rank for place in working for rank in place.ranks]
    if 0 < 2 * len(at_work) <= len(known):
        return StackComparison(places, tuple(sorted(at_work)))

    def without_library_lines(stack: Stack) -> object:
        # There, waiting code runs in loops.
        return tuple((frame.function, frame.file, frame.is_users and frame.line) for frame in stack)

    *fewer, most = _groups(known, without_library_lines) or (StackGroup((), ()),)
    odd = [rank for group in fewer for rank in group.ranks]
    return StackComparison(places, tuple(sorted(odd)) if len(most.ranks) > len(odd) else ())


def _groups(stacks: Mapping[int, Stack], key: Callable[[Stack], object]) -> tuple[StackGroup, ...]:
    """Return the ranks whose stacks have one KEY, the smallest group first."""
    groups: dict[object, list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(key(stacks[rank]), []).append(rank)
    made = [StackGroup(tuple(ranks), stacks[ranks[0]]) for ranks in groups.values()]
    return tuple(sorted(made, key=lambda place: (len(place.ranks), place.ranks)))
