"""Fetches the Python stacks of ranks, without blocking on any.

py-spy is used if installed; otherwise Python's own faulthandler, by a signal for which our code in
the rank (`inject/site/sitecustomize.py`) has prepared a file in memory.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from fleetrun.plan.environment import STACK_SIGNAL
from fleetrun.run import isolation, proc
from fleetrun.run.loop import Waiting
from fleetrun.rundir import secrets

# The name of that file in memory.
MEMORY = "fleetrun-stacks"
# py-spy takes 50 ms, but never returns for a rank that hangs in the kernel.
_SPY_S = 10.0
_AT_ONCE = 8
# Python answers at once, if it can be interrupted at all.
_ANSWER_S = 3.0
_LOOK_S = 0.03
# The most processes of a rank that are asked.
_MOST_CHILDREN = 32


def find_spy() -> str | None:
    """Return the path of py-spy, if it is installed beside our Python or on the PATH."""
    folders = [os.path.dirname(sys.executable), *os.get_exec_path()]
    return shutil.which("py-spy", path=os.pathsep.join(filter(None, folders)))


class Collection:
    """Asks the ranks whose leaders are PIDS, by process of the plan, for their stacks, once.

    DONE is called with their answers when all are complete, which may be before this returns.
    """

    def __init__(
        self, pids: Mapping[int, int], waiting: Waiting, done: Callable[[dict[int, str]], None]
    ) -> None:
        self.waiting = waiting
        self.spy = find_spy()
        self.is_over = False
        self._done = done
        self._texts: dict[int, str] = {}
        families = proc.families(proc.all_processes(), pids.values())
        self._open = len(pids)
        self._todo = [_RankDump(process, families[pid], self) for process, pid in pids.items()]

    def begin(self) -> None:
        """Ask the first ranks."""
        for _ in range(_AT_ONCE):
            self._next()

    def _next(self) -> None:
        if self._todo and not self.is_over:
            self._todo.pop(0).begin()

    def cancel(self) -> None:
        """Stop collecting; `done` will not be called."""
        self.is_over = True

    def answered(self, process: int, text: str) -> None:
        """Take the answer of one rank."""
        self._texts[process] = text
        self._open -= 1
        if self.is_over:
            return
        if self._open:
            self._next()
        else:
            self.is_over = True
            self._done(dict(sorted(self._texts.items())))


class _RankDump:
    """One rank, which is asked by py-spy, or by signal, child after child."""

    def __init__(self, process: int, family: Sequence[proc.Stat], collection: Collection) -> None:
        self._process = process
        self._collection = collection
        self._text = ""
        # Parents are older than their children.
        self._family = sorted(family, key=lambda member: (member.started, member.pid))
        self._pythons = [member for member in self._family if proc.is_python(member.pid)]
        del self._pythons[_MOST_CHILDREN:]

    def begin(self) -> None:
        """Begin to ask this rank."""
        if not self._pythons:
            self._describe("no Python runs here")
        elif self._pythons[0].state in "Tt":
            self._describe("it is stopped and cannot answer")
        elif self._collection.spy is None or not self._run_spy(self._collection.spy):
            self._ask_next()

    def _describe(self, why: str) -> None:
        """Answer with the state of the processes: for a shell, say, it is better than nothing."""
        self._text += f"# {why}\n"
        for member in self._family[:_MOST_CHILDREN]:
            at = proc.state_of(member.pid)
            self._text += f"# process {member.pid}: {proc.command(member.pid)}: {at}\n"
        self._collection.answered(self._process, self._text)

    def _run_spy(self, spy: str) -> bool:
        argv = [spy, "dump", "--full-filenames", "--subprocesses", "--pid"]
        argv.append(str(self._pythons[0].pid))
        try:
            dump = isolation.run_program(argv, os.environ, outputs=(1, 2))
        except OSError as error:
            self._text += f"# py-spy cannot be started: {error.strerror}\n"
            return False
        dump.watch(self._collection.waiting, self._on_spy, _SPY_S)
        return True

    def _on_spy(self, answer: isolation.CallResult) -> None:
        if answer.is_late:
            self._text += f"# py-spy did not answer within {_SPY_S:g} s\n"
        # Its output includes the command line.
        dump = secrets.mask(cast("bytes", answer.value or b"").decode(errors="replace"))
        self._text += dump
        if "\nThread " in dump:
            self._collection.answered(self._process, self._text)
        else:
            # py-spy may not inspect other processes here (a container without that capability).
            self._ask_next()

    def _ask_next(self) -> None:
        """Ask the next Python of the rank; one at a time, as forked children share the file."""
        while self._pythons and not self._collection.is_over:
            member = self._pythons.pop(0)
            self._text += f"# process {member.pid}: {proc.command(member.pid)}\n"
            memory = proc.descriptor(member.pid, MEMORY)
            if memory is None or not proc.catches(member.pid, STACK_SIGNAL):
                self._text += (
                    "# it cannot be asked: it ignores PYTHONPATH (python -I, -E, -S), or has "
                    "closed its files; py-spy, if installed, works anyway\n"
                )
                continue
            try:
                fd = os.open(memory, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                self._text += f"# it cannot be asked: {error.strerror}\n"
                continue
            size = os.fstat(fd).st_size
            try:
                proc.send(member, STACK_SIGNAL)
            except OSError as error:
                os.close(fd)
                self._text += f"# it cannot be asked: {error.strerror}\n"
                continue
            self._await(member.pid, fd, size, size, time.monotonic() + _ANSWER_S)
            return
        self._collection.answered(self._process, self._text)

    def _await(self, pid: int, fd: int, begin: int, before: int, until: float) -> None:
        """Take the answer of PID in the file FD from BEGIN on, once it has stopped growing."""

        def look() -> None:
            size = os.fstat(fd).st_size
            if not begin < size == before and time.monotonic() < until:
                self._await(pid, fd, begin, size, until)
                return
            text = os.pread(fd, size - begin, begin).decode(errors="replace")
            os.close(fd)
            late = f"# it did not answer within {_ANSWER_S:g} s: {proc.state_of(pid)}\n"
            self._text += text or late
            self._ask_next()

        key = "stacks of", self._process
        self._collection.waiting.timer(key, time.monotonic() + _LOOK_S, look)
