"""A small launcher for tests: `driver.py SPEC.json` runs a hand-made plan under the Supervisor.

SPEC: {"commands": [[argv...], ...], "folder": "...", "grace_s": 1, "max_restarts": 0,
"essential": [true, ...], "tee": [0], "keep": 20, "overwrite": false, "preface": "...",
"strategy": {...}}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from fleetrun.errors import FleetrunError
from fleetrun.model import Endpoint, LaunchPlan, ProcessSpec, RankSpec, Rules
from fleetrun.run import proc
from fleetrun.run.events import Exited, Started
from fleetrun.run.listeners import Sink, Source
from fleetrun.run.supervisor import Supervisor
from fleetrun.sinks.console import Console
from fleetrun.sinks.eventlog import EventLog
from fleetrun.sinks.messages import Messages
from fleetrun.sinks.rundir import RunDirectory
from fleetrun.sources.proof import Proof

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.run.events import Declared, Happening
    from fleetrun.run.loop import Waiting


class InterruptBetweenDeaths(Sink):
    """When rank 0 has ended, let rank 1 end, then 2; send ourselves TERM between their exits."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._pids: dict[int, int] = {}

    def open(self, waiting: Waiting) -> None:
        """Let nothing but the deaths and our own signal wake the loop."""
        del waiting
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])

    def tell(self, happening: Happening) -> None:
        """Make it happen."""
        match happening:
            case Started(process=process, pid=pid):
                self._pids[process] = pid
            case Exited(process=0):
                for rank in (1, 2):
                    (self._folder / f"go{rank}").touch()
                    while proc.stat(self._pids[rank]) is not None:
                        time.sleep(0.005)
            case Exited(process=1):
                os.kill(os.getpid(), signal.SIGTERM)
            case _:
                pass


class BrokenSource(Source):
    """Fails in the middle of the run, when a rank makes the file `break`."""

    name = "the session with the other hosts"
    without = "without word of the other hosts"
    is_required = True

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / "break"

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Look for the file again and again."""
        if self._file.exists():
            text = "no such message"
            raise KeyError(text)
        again = partial(self.open, waiting, declare)
        waiting.alarm("look", time.monotonic() + 0.01, again)


def main(path: str) -> int:
    """Run the plan of the file PATH and return its exit code."""
    wanted = json.loads(Path(path).read_text())
    ranks = [
        RankSpec("TRAINER", i, i, 0, (), Endpoint("127.0.0.1", 6070 + i))
        for i in range(len(wanted["commands"]))
    ]
    essential = wanted.get("essential", [True] * len(ranks))
    processes = tuple(
        ProcessSpec(
            name=f"trainer.{rank.rank}",
            argv=tuple(command),
            env={"PADDLE_TRAINER_ID": str(rank.rank), **wanted.get("env", {})},
            unset=("DROP_ME",),
            log=f"workerlog.{rank.rank}",
            essential=is_essential,
            rank=rank,
        )
        for rank, command, is_essential in zip(ranks, wanted["commands"], essential, strict=True)
    )
    folder = wanted["folder"]
    run = wanted.get("run", f"run-{os.getpid()}")
    strategy = wanted.get("strategy")
    plan = LaunchPlan(
        job_id="test",
        mode="collective",
        engine="local",
        generation=0,
        node_rank=0,
        nodes=("127.0.0.1",),
        ranks=tuple(ranks),
        processes=processes,
        rules=Rules(wanted.get("grace_s", 5.0), wanted.get("max_restarts", 0)),
        cwd=folder,
        log_dir=f"{folder}/log",
        run_dir=f"{folder}/log/runs/{run}",
        files={f"log/runs/{run}/strategy.json": json.dumps(strategy)} if strategy else {},
    )
    preface = wanted.get("preface")
    messages = Messages(None if preface is None else lambda: preface)
    rundir = RunDirectory(
        plan,
        keep=wanted.get("keep", 20),
        overwrite=wanted.get("overwrite", False),
        say=messages.say,
    )
    console = Console(plan, tuple(wanted.get("tee", [0])), say=messages.say)
    sinks: list[Sink] = [messages, rundir, EventLog(plan), console]
    sources: list[Source] = []
    if strategy:
        sources.append(Proof(plan, say=messages.say, show=messages.show))
    if wanted.get("broken_source"):
        sources.append(BrokenSource(folder))
    if wanted.get("interrupt_between_deaths"):
        sinks.append(InterruptBetweenDeaths(folder))
    supervisor = Supervisor(
        plan, sinks=sinks, sources=sources, say=messages.say, show=messages.show
    )
    try:
        return supervisor.run().exit_code
    except FleetrunError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
