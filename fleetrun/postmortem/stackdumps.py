"""Fetches the Python stacks of ranks into the run directory, without blocking on any.

py-spy is used if installed; otherwise Python itself, by a signal for which our code in the rank
(`inject/site/sitecustomize.py`) has prepared a file in memory.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from fleetrun.plan.environment import STACK_SIGNAL
from fleetrun.run import isolation, proc
from fleetrun.run.loop import Waiting
from fleetrun.rundir import secrets

# The name of that file in memory.
MEMORY = "fleetrun-stacks"
# py-spy takes 50 ms, but never returns for a rank that hangs in the kernel.
_SPY_S = 10.0
_SPIES_AT_ONCE = 8
# Python answers at once, if it can be interrupted at all.
_ANSWER_S = 3.0
_LOOK_S = 0.03
# The most children of a rank that are asked.
_MOST_CHILDREN = 32


# Links are not followed.
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


class StackTarget(NamedTuple):
    """A rank to ask: the leader of its processes, and the file for the answer."""

    process: int
    label: str
    pid: int
    path: str


def find_spy() -> str | None:
    """Return the path of py-spy, if it is installed beside our Python or on the PATH."""
    folders = [os.path.dirname(sys.executable), *os.get_exec_path()]
    return shutil.which("py-spy", path=os.pathsep.join(filter(None, folders)))


class Collection:
    """Asks all TARGETS once, and calls DONE with their answers when all are complete."""

    def __init__(
        self,
        targets: Sequence[StackTarget],
        *,
        reason: str,
        waiting: Waiting,
        spy: str | None,
        environ: Mapping[str, str],
        done: Callable[[dict[int, str]], None],
    ) -> None:
        self._waiting = waiting
        self._spy = spy
        self._environ = environ
        self._done = done
        self._texts: dict[int, str] = {}
        families = proc.families(proc.all_processes(), [target.pid for target in targets])
        self._todo = [_Asking(target, families[target.pid], self) for target in targets]
        self._open = {asking.target.process for asking in self._todo}
        self._running = 0
        self.is_over = False
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        for asking in self._todo:
            asking.write(f"# {when} {asking.target.label}: {reason}\n")

    def begin(self) -> None:
        """Ask the first ones; `done` may be called before this returns."""
        self._next()

    def cancel(self) -> None:
        """Stop collecting; `done` will not be called."""
        self.is_over = True

    def _next(self) -> None:
        while self._todo and self._running < _SPIES_AT_ONCE and not self.is_over:
            self._running += 1
            self._todo.pop(0).begin(self._waiting, self._spy, self._environ)

    def answered(self, process: int, text: str) -> None:
        """Record the answer of one rank."""
        self._running -= 1
        self._texts[process] = text
        self._open.discard(process)
        if self.is_over:
            return
        if not self._open:
            self.is_over = True
            self._done(self._texts)
            return
        self._next()


class _Asking:
    """One rank being asked: by py-spy, then by signal, child after child."""

    def __init__(
        self, target: StackTarget, family: Sequence[proc.Stat], collection: Collection
    ) -> None:
        self.target = target
        self._collection = collection
        # Parents are older than their children.
        ordered = sorted(family, key=lambda process: (process.started, process.pid))
        self._family = [process for process in ordered if proc.is_python(process.pid)][
            :_MOST_CHILDREN
        ]
        self._other_programs = [process for process in ordered if process not in self._family]
        self._begin = 0

    def write(self, text: str) -> None:
        """Append TEXT to the rank's file, unless the collection is over: it may be gone then."""
        if self._collection.is_over:
            return
        fd = os.open(self.target.path, _APPEND | os.O_CLOEXEC, 0o600)
        with open(fd, "a", encoding="utf-8", errors="replace") as file:
            file.write(text)

    def begin(self, waiting: Waiting, spy: str | None, environ: Mapping[str, str]) -> None:
        """Begin to ask this rank."""
        self._waiting = waiting
        self._begin = os.stat(self.target.path).st_size
        if not self._family:
            # For a shell, say, the state of its processes is better than nothing.
            self._describe(self._other_programs, "no Python runs here")
            self._end()
        elif self._family[0].state in "Tt":
            self._describe(self._family, "it is stopped and cannot answer")
            self._end()
        elif spy is None:
            self._ask_next()
        else:
            self._run(spy, environ)

    def _describe(self, family: Sequence[proc.Stat], why: str) -> None:
        self.write(f"# {why}\n")
        for process in family[:_MOST_CHILDREN]:
            at = proc.state_of(process.pid)
            self.write(f"# process {process.pid}: {proc.command(process.pid)}: {at}\n")

    def _end(self) -> None:
        if self._collection.is_over:
            return
        with open(self.target.path, "rb") as file:
            file.seek(self._begin)
            text = file.read().decode(errors="replace")
        self.write("\n")
        self._collection.answered(self.target.process, text)

    # py-spy -------------------------------------------------------------------------------------

    def _run(self, spy: str, environ: Mapping[str, str]) -> None:
        main = self._family[0].pid
        argv = [spy, "dump", "--full-filenames", "--subprocesses", "--pid", str(main)]
        try:
            dump = isolation.run_program(argv, environ, outputs=(1, 2))
        except OSError as error:
            self.write(f"# py-spy cannot be started: {error.strerror}\n")
            self._ask_next()
            return
        dump.watch(self._waiting, self._on_spy, _SPY_S)

    def _on_spy(self, answer: isolation.CallResult) -> None:
        if answer.is_late:
            self.write(f"# py-spy did not answer within {_SPY_S:g} s\n")
        dump = cast("bytes", answer.value or b"").decode(errors="replace")
        # Its output includes the command line.
        self.write(secrets.mask(dump))
        if "\nThread " in dump:
            self._end()
            return
        # py-spy may not inspect other processes here (a container without that capability).
        self._ask_next()

    # The signal ---------------------------------------------------------------------------------

    def _ask_next(self) -> None:
        """Ask the next Python of the rank; one at a time, as forked children share the file."""
        while self._family:
            process = self._family.pop(0)
            self.write(f"# process {process.pid}: {proc.command(process.pid)}\n")
            trouble = self._ask(process)
            if not trouble:
                return
            self.write(f"# {trouble}\n")
        self._end()

    def _ask(self, process: proc.Stat) -> str:
        """Send the signal to PROCESS; return what prevents that."""
        memory = proc.descriptor(process.pid, MEMORY)
        if memory is None or not proc.catches(process.pid, STACK_SIGNAL):
            return (
                "it cannot be asked: it ignores PYTHONPATH (python -I, -E, -S), or has closed "
                "its files; py-spy, if installed, works anyway"
            )
        try:
            self._fd = os.open(memory, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return f"it cannot be asked: {error.strerror}"
        self._seen = self._offset = os.fstat(self._fd).st_size
        try:
            proc.send(process, STACK_SIGNAL)
        except OSError as error:
            os.close(self._fd)
            return f"it cannot be asked: {error.strerror}"
        self._asked, self._deadline = process.pid, time.monotonic() + _ANSWER_S
        self._look_again()
        return ""

    def _look_again(self) -> None:
        key = ("answer", self.target.process)
        self._waiting.timer(key, time.monotonic() + _LOOK_S, self._on_look)

    def _on_look(self) -> None:
        size = os.fstat(self._fd).st_size
        is_whole = self._offset < size == self._seen
        self._seen = size
        if not is_whole and time.monotonic() < self._deadline:
            self._look_again()
            return
        text = os.pread(self._fd, size - self._offset, self._offset).decode(errors="replace")
        os.close(self._fd)
        if self._collection.is_over:
            return
        if not text:
            text = f"# it did not answer within {_ANSWER_S:g} s: {proc.state_of(self._asked)}\n"
        self.write(text)
        self._ask_next()
