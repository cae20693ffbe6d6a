"""A small launcher for tests: `driver.py SPEC.json` runs a hand-made plan under the Supervisor.

SPEC: {"commands": [[argv...], ...], "folder": "...", "grace_s": 1, "max_restarts": 0, "tee": [0],
"strategy": {...}, "broken_source": false, "interrupt_between_deaths": false}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from fleetrun.errors import FleetrunError
from fleetrun.model import Endpoint, LaunchPlan, ProcessSpec, RankSpec, Request, Rules, Script
from fleetrun.run import proc
from fleetrun.run.events import Exited, Started
from fleetrun.run.gathering import Gathering
from fleetrun.run.keeper import Keeper, keep
from fleetrun.run.observers import ObservedJob, Sink, Source
from fleetrun.run.supervisor import Supervisor
from fleetrun.sinks.console import Console
from fleetrun.sinks.eventlog import EventLog
from fleetrun.sinks.launcher_lines import Messages
from fleetrun.sinks.rundir import RunDirectory
from fleetrun.watch.proof import Proof

if TYPE_CHECKING:
    from fleetrun.run.events import Happening
    from fleetrun.run.loop import Waiting


class InterruptBetweenDeaths(Sink):
    """After rank 0 has ended, let rank 1 end, then 2; send the keeper TERM in between."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._pids: dict[int, int] = {}

    def open(self, waiting: Waiting) -> None:
        """Let only these exits and this signal wake the loop."""
        del waiting
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])

    def on_event(self, happening: Happening) -> None:
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
                os.kill(os.getppid(), signal.SIGTERM)
            case _:
                pass


class BrokenSource(Source):
    """Fails during the run, when a rank makes the file `break`."""

    name = "the session with the other hosts"
    is_required = True

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / "break"

    def open(self, waiting: Waiting) -> None:
        """Look for the file again and again."""
        if self._file.exists():
            raise KeyError("no such message")
        again = partial(self.open, waiting)
        waiting.timer("look", time.monotonic() + 0.01, again)


def plan(wanted: dict[str, Any], attempt: int) -> LaunchPlan:
    """Return the plan of ATTEMPT."""
    commands = wanted["commands"]
    ranks = [
        RankSpec("TRAINER", i, i, 0, (), Endpoint("127.0.0.1", 6070 + i))
        for i in range(len(commands))
    ]
    folder = wanted["folder"]
    run = f"run-{os.getpid()}"
    strategy = wanted.get("strategy")
    records = f"log/runs/{run}/rank" if strategy else None
    processes = tuple(
        ProcessSpec(
            name=f"trainer.{rank.rank}",
            argv=tuple(command),
            env={
                "PADDLE_TRAINER_ID": str(rank.rank),
                **({"FLEETRUN_RECORDS": f"{records}.{rank.rank}.jsonl"} if records else {}),
            },
            unset=("DROP_ME",),
            log=f"workerlog.{rank.rank}",
            rank=rank,
        )
        for rank, command in zip(ranks, commands, strict=True)
    )
    return LaunchPlan(
        job_id="test",
        mode="collective",
        engine="local",
        generation=attempt,
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


class DrivenJob(ObservedJob):
    """The job of a test."""

    def __init__(self, wanted: dict[str, Any], keeper: Keeper) -> None:
        self._messages = Messages()
        self._wanted = wanted
        tee = ",".join(map(str, wanted.get("tee", [0])))
        request = Request(Script("file", "train.py", ()), tee=tee)
        log, show = self._messages.log, self._messages.show
        super().__init__(request, {}, log=log, show=show, keeper=keeper)

    def observing(self) -> list[Sink]:
        """Return the observers that show the job, and the one that breaks it."""
        wanted = self._wanted
        observers: list[Sink] = [self._messages, RunDirectory(self)]
        observers += [EventLog(self), Console(self)]
        if wanted.get("strategy"):
            observers.append(Proof(self))
        if wanted.get("broken_source"):
            observers.append(BrokenSource(wanted["folder"]))
        if wanted.get("interrupt_between_deaths"):
            observers.append(InterruptBetweenDeaths(wanted["folder"]))
        return observers


def main(path: str) -> int:
    """Run the plan of the file PATH and return its exit code."""
    wanted = json.loads(Path(path).read_text())
    try:
        job = DrivenJob(wanted, keep())
        supervisor = Supervisor(Gathering(partial(plan, wanted)), job)
        return supervisor.run().exit_code
    except FleetrunError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
