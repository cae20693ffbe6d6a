"""Reads dumped Python stacks, and finds the ranks that stand elsewhere than most."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

# A rank with one of these functions on its stack waits for others.
_MEETINGS = """
all_gather all_gather_object all_reduce all_reduce_ alltoall alltoall_single barrier broadcast
broadcast_object_list gather gloo_barrier irecv isend new_group recv reduce reduce_scatter
fused_allreduce_gradients init_parallel_env init_rpc scatter send stream_synchronize
"""
_MEETING = frozenset(_MEETINGS.split())
# Parts of Paddle, which need not be among the installed packages, that call collectives and wait.
_PADDLE = tuple(
    f"/paddle/{part}/"
    for part in (
        "autograd",
        "base",
        "distributed",
        "framework",
        "hapi",
        "nn",
        "optimizer",
        "tensor",
    )
)
# Code that the user did not write.
_LIBRARIES = (
    *("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen "),
    *_PADDLE,
    # From a checkout.
    "/fleetrun/inject/",
)
# Our wrappers of Paddle's calls, which are in every stack.
_OURS = tuple(
    f"/inject/{name}.py"
    for name in (
        "flight_recorder",
        "border",
        "import_hooks",
        "store_wait",
        "gloo_stores",
    )
)


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
    r"""Return the stacks of all threads in a DUMP, by process; nothing of those without any.

    >>> of_processes('# process 7: python\n# it cannot be asked\n# process 9: python\nThread 0x1 '
    ...              '(most recent call first):\n  File "b.py", line 4 in g\n')
    {9: ((Frame(function='g', file='b.py', line=4),),)}
    """
    # Threads are listed in any order.
    return {
        pid: tuple(sorted(tuple(frames) for _, frames in threads))
        for pid, threads in _threads(dump).items()
        if threads and pid is not None
    }


def main_thread(dump: str) -> Stack:
    r"""Return the stack of the main thread in a DUMP by py-spy or faulthandler.

    That of its first process: what follows belongs to a child of the rank.

    >>> main_thread('Thread 7 (idle): "MainThread"\n    wait (a.py:3)\n    <module> (a.py:9)\n')[0]
    Frame(function='wait', file='a.py', line=3)
    >>> main_thread('Current thread 0x7 (most recent call first):\n  File "a.py", line 3 in f\n')
    (Frame(function='f', file='a.py', line=3),)
    """
    return _main(next(filter(None, _threads(dump).values()), ()))


def _threads(dump: str) -> dict[int | None, list[tuple[bool, list[Frame]]]]:
    """Return the threads in DUMP by process: whether each is named as the main one, and its stack.

    None: those before any process is named.
    """
    current: list[tuple[bool, list[Frame]]] = []
    threads: dict[int | None, list[tuple[bool, list[Frame]]]] = {None: current}
    for line in dump.splitlines():
        word, _, remaining = line.removeprefix("# ").partition(" ")
        number = remaining.partition(":")[0]
        if word in {"process", "Process"} and number.isdigit():
            current = threads[int(number)] = []
        elif line.startswith(("Thread ", "Current thread ")):
            current.append((line.rstrip().endswith('"MainThread"'), []))
        elif current and line[:1].isspace():
            frame = _frame(line.strip())
            if frame is not None:
                current[-1][1].append(frame)
    return threads


def _main(threads: Sequence[tuple[bool, list[Frame]]]) -> Stack:
    named = [frames for is_main, frames in threads if is_main]
    # faulthandler names no threads; it begins with the youngest.
    return tuple(named[0] if named else threads[-1][1] if threads else ())


def _frame(line: str) -> Frame | None:
    if line.startswith('File "'):
        file, _, remaining = line[6:].rpartition('", line ')
        number, _, function = remaining.partition(" in ")
    else:
        function, _, remaining = line.removesuffix(")").partition(" (")
        file, _, number = remaining.rpartition(":")
    if not (file and number.isdigit()) or file.endswith(_OURS):
        return None
    return Frame(function, file, int(number))


def compare(stacks: Mapping[int, Stack], waiting: Container[int] = ()) -> StackComparison:
    """Find the ranks that stand elsewhere than the majority; none if there is no majority.

    The ranks WAITING may wait for others, whatever function they are in.
    """

    def is_meeting(group: StackGroup) -> bool:
        return group.is_meeting or any(rank in waiting for rank in group.ranks)

    known = {rank: stack for rank, stack in stacks.items() if stack}
    if not known:
        return StackComparison((), ())
    # Places are reported by line, as ranks in different calls of one function are of interest. Odd
    # ranks are found by lines, then by the user's lines, and by functions only if no majority is on
    # the same lines.
    places = _places(known, _exactly)
    for key in (_exactly, _by_users_lines, _by_function, _innermost):
        groups = _places(known, key)
        if 2 * len(groups[-1].ranks) > len(known):
            # A rank without a stack is not odd; nor is one that waits elsewhere, if others do not.
            absent = [group for group in groups[:-1] if not is_meeting(group)]
            fewer = absent if absent and is_meeting(groups[-1]) else groups[:-1]
            odd = [rank for group in fewer for rank in group.ranks]
            return StackComparison(places, tuple(sorted(odd)))
    # Of two ranks, for example, the one that waits for the other is not odd.
    absent = [place for place in places if not is_meeting(place)]
    if 0 < len(absent) < len(places):
        odd = [rank for place in absent for rank in place.ranks]
        if 2 * len(odd) <= len(known):
            return StackComparison(places, tuple(sorted(odd)))
    return StackComparison(places, ())


def is_in_paddle(stack: Stack) -> bool:
    """Whether Paddle itself runs, but not its loader of data, which calls no collectives."""
    file = stack[0].file if stack else ""
    is_paddle = "-packages/paddle/" in file or any(part in file for part in _PADDLE)
    return is_paddle and "/paddle/io/" not in file


def _places(stacks: Mapping[int, Stack], key: Callable[[Stack], object]) -> tuple[StackGroup, ...]:
    groups: dict[object, list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(key(stacks[rank]), []).append(rank)
    groups_ = [StackGroup(tuple(ranks), stacks[ranks[0]]) for ranks in groups.values()]
    return tuple(sorted(groups_, key=lambda place: (len(place.ranks), place.ranks)))


def _exactly(stack: Stack) -> object:
    return stack


def _by_users_lines(stack: Stack) -> object:
    """Return STACK without line numbers in libraries, where waiting code runs in loops."""
    return tuple((frame.function, frame.file, frame.is_users and frame.line) for frame in stack)


def _by_function(stack: Stack) -> object:
    return tuple((frame.function, frame.file) for frame in stack)


def _innermost(stack: Stack) -> object:
    return stack[0].function, stack[0].file
