"""Tasks of an engine that are killed, and the ranks that end with them."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

from waiting import LONG_S

from fleetrun.run.events import RunWarning, SignalAll, Started
from fleetrun.run.loop import Loop
from fleetrun.sources.losttasks import LostTasks

if TYPE_CHECKING:
    from fleetrun.run.events import Declared


def test_a_task_that_is_lost_before_its_rank_starts_ends_it_then_and_none_that_is_ending() -> None:
    remarks: list[str] = []
    declared: list[Declared] = []
    with ExitStack() as stack:
        loop = Loop()
        stack.callback(loop.close)
        pipes = [os.pipe() for _ in range(2)]
        for read_fd, write_fd in pipes:
            stack.callback(os.close, read_fd)
            stack.callback(os.close, write_fd)
        heard = {task: pipe[0] for task, pipe in enumerate(pipes)}
        source = LostTasks(heard, log=remarks.append)
        source.open(loop, declared.append)
        os.write(pipes[0][1], b"gone")
        loop.turn()
        assert remarks == []
        ranks = [subprocess.Popen(["sleep", "1000"]) for _ in pipes]
        for rank in ranks:
            stack.enter_context(rank)
            stack.callback(rank.kill)
        for index, rank in enumerate(ranks):
            source.on_event(Started(index, f"rank {index}", rank.pid, 1.0))
        assert ranks[0].wait(LONG_S) == -signal.SIGKILL
        assert remarks == [
            "The engine's task of rank 0 is gone (kill -9?), so rank 0 is killed, too."
        ]
        warnings = [warning for warning in declared if isinstance(warning, RunWarning)]
        assert [warning.what for warning in warnings] == ["task lost"]
        # The engine ends the job, and any leftovers later.
        source.on_event(SignalAll(signal.SIGTERM))
        os.write(pipes[1][1], b"gone")
        loop.turn()
        assert (len(remarks), ranks[1].poll()) == (1, None)
