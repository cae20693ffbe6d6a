"""Fetches the Python stacks of ranks, without blocking on any.

Python's own faulthandler writes them, by a signal for which our code in the rank
(`inject/site/sitecustomize.py`) has prepared a file in memory.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping

from fleetrun.plan.environment import STACK_SIGNAL
from fleetrun.run import proc
from fleetrun.run.loop import Waiting

# The name of that file in memory.
MEMORY = "fleetrun-stacks"
# Python answers at once, if it can be interrupted at all.
_ANSWER_S = 3.0
_LOOK_S = 0.03
# The most processes of a rank that are asked.
_MOST_CHILDREN = 32


class Collection:
    """Asks the ranks whose leaders are PIDS, by process of the plan, for their stacks, once.

    DONE is called with their answers when all are complete, which may be before `begin` returns.
    """

    def __init__(
        self, pids: Mapping[int, int], waiting: Waiting, done: Callable[[dict[int, str]], None]
    ) -> None:
        self._waiting = waiting
        self._done = done
        self._texts = dict.fromkeys(sorted(pids), "")
        # The processes that are still to be asked, and the answers that may be incomplete.
        self._todo: dict[int, list[proc.Stat]] = {}
        self._answers: dict[int, _Answer] = {}
        families = proc.families(proc.all_processes(), pids.values())
        self._families = {process: families[pid] for process, pid in pids.items()}

    def begin(self) -> None:
        """Ask all ranks."""
        for process, family in self._families.items():
            pythons = [member for member in family if proc.is_python(member.pid)]
            if pythons and pythons[0].state not in "Tt":
                self._todo[process] = pythons[:_MOST_CHILDREN]
                continue
            # The state of the processes: for a shell, say, it is better than nothing.
            why = "it is stopped and cannot answer" if pythons else "no Python runs here"
            self._texts[process] = f"# {why}\n" + "".join(
                f"# process {member.pid}: {proc.command(member.pid)}: {proc.state_of(member.pid)}\n"
                for member in family[:_MOST_CHILDREN]
            )
        self._look()

    def cancel(self) -> None:
        """Stop collecting; `done` will not be called."""
        self._waiting.timer(("stacks", id(self)), None, self._look)
        while self._answers:
            self._answers.popitem()[1].take()

    def _look(self) -> None:
        """Take what is complete, and ask the next process of these ranks."""
        for process, pythons in list(self._todo.items()):
            answer = self._answers.get(process)
            if answer is not None and answer.is_growing():
                continue
            if answer is not None:
                self._texts[process] += self._answers.pop(process).take()
            # One at a time, as forked children share the file.
            while pythons and process not in self._answers:
                member = pythons.pop(0)
                self._texts[process] += f"# process {member.pid}: {proc.command(member.pid)}\n"
                try:
                    self._answers[process] = _Answer(member)
                except OSError as error:
                    self._texts[process] += f"# it cannot be asked: {error.strerror}\n"
            if process not in self._answers:
                del self._todo[process]
        if self._todo:
            self._waiting.timer(("stacks", id(self)), time.monotonic() + _LOOK_S, self._look)
        else:
            self._done(self._texts)


class _Answer:
    """What MEMBER writes into its file when asked, which this does; OSError if it cannot be."""

    def __init__(self, member: proc.Stat) -> None:
        files = proc.open_files(member.pid)
        memory = next((path for path, target in files if MEMORY in target), None)
        if memory is None or not proc.catches(member.pid, STACK_SIGNAL):
            why = "it ignores PYTHONPATH (python -I, -E, -S), or has closed its files"
            raise OSError(errno.ENOENT, why)
        self._pid = member.pid
        self._begin = self._size = os.stat(memory).st_size
        self._until = time.monotonic() + _ANSWER_S
        proc.send(member, STACK_SIGNAL)
        self._fd = os.open(memory, os.O_RDONLY | os.O_CLOEXEC)

    def is_growing(self) -> bool:
        """Whether it may be incomplete: it has grown since the last call, or not begun."""
        before, self._size = self._size, os.fstat(self._fd).st_size
        return not self._begin < self._size == before and time.monotonic() < self._until

    def take(self) -> str:
        """Return it, and close the file."""
        text = os.pread(self._fd, self._size - self._begin, self._begin).decode(errors="replace")
        os.close(self._fd)
        late = f"# it did not answer within {_ANSWER_S:g} s: {proc.state_of(self._pid)}\n"
        return text or late
