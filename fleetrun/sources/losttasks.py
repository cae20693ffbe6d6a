"""Watches an engine's tasks on this host: if one is killed, its rank is killed, too."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from fleetrun.run.events import Exited, Gathered, RunWarning, SignalAll, Started
from fleetrun.run.observers import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleetrun.run.events import Declared, Happening
    from fleetrun.run.loop import Waiting


class LostTasks(Source):
    """Kills the rank of a task that is gone, as the engine would have killed both in one.

    TASKS are the descriptors that become readable when the task of a process is gone. This source
    may fail: a job that trains well is not ended because tasks are no longer watched.
    """

    name = "watching the engine's tasks"
    without = "without noticing killed tasks"

    def __init__(self, tasks: Mapping[int, int], *, log: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._log = log
        self._pids: dict[int, int] = {}
        self._labels: dict[int, str] = {}
        # Tasks that were lost before their rank was started.
        self._early: set[int] = set()
        self._is_ending = False

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Begin."""
        super().open(waiting, declare)
        for task, fd in self._tasks.items():
            waiting.watch(fd, partial(self._on_lost, task, fd))

    def on_event(self, happening: Happening) -> None:
        """Note which process each rank has, and whether they are ending anyway."""
        match happening:
            case Gathered():
                self._is_ending = False
            case Started(process=process, label=label, pid=pid):
                self._pids[process], self._labels[process] = pid, label
                if process in self._early:
                    self._kill(process)
            case Exited(process=process):
                self._pids.pop(process, None)
            case SignalAll() if happening.ends_ranks:
                # The engine may kill whatever is left of the job.
                self._is_ending = True
            case _:
                pass

    def _on_lost(self, task: int, fd: int) -> None:
        self._waiting.unwatch(fd)
        if self._is_ending:
            return
        if task in self._pids:
            self._kill(task)
        else:
            self._early.add(task)

    def _kill(self, task: int) -> None:
        self._early.discard(task)
        label = self._labels[task]
        text = f"The engine's task of {label} is gone (kill -9?), so {label} is killed, too."
        self._log(text)
        self._declare(RunWarning("task lost", text, time.monotonic(), (label,)))
        # It is not reaped before its exit is handled, when the rest of its group is killed, too.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self._pids[task], signal.SIGKILL)
