"""A small launcher for tests: `driver.py SPEC.json` runs a hand-made plan under the Supervisor.

SPEC: {"commands": [[argv...], ...], "folder": "...", "grace_s": 1, "max_restarts": 0,
"essential": [true, ...], "tee": [0], "keep": 20, "overwrite": false, "preface": "...",
"strategy": {...}, "generations": [[[argv...], ...], ...], "gathering": "later", "patience_s": 10}
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

from fleetrun.errors import EnvironmentFault, FleetrunError
from fleetrun.model import Endpoint, LaunchPlan, ProcessSpec, RankSpec, Request, Rules, Script
from fleetrun.run import proc
from fleetrun.run.events import Exited, Started
from fleetrun.run.gathering import Gathering
from fleetrun.run.keeper import Keeper, keep
from fleetrun.run.observers import ObservedJob, Sink, Source
from fleetrun.run.supervisor import Supervisor
from fleetrun.sinks import console
from fleetrun.sinks.console import Console
from fleetrun.sinks.eventlog import EventLog
from fleetrun.sinks.launcher_lines import Messages
from fleetrun.sinks.rundir import RunDirectory
from fleetrun.watch.proof import Proof
from fleetrun.watch.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.run.events import Happening
    from fleetrun.run.gathering import Answer
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
    without = "without contact to the other hosts"
    is_required = True

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / "break"

    def open(self, waiting: Waiting) -> None:
        """Look for the file again and again."""
        if self._file.exists():
            raise KeyError("no such message")
        again = partial(self.open, waiting)
        waiting.timer("look", time.monotonic() + 0.01, again)


class Hosts(Gathering):
    """Gathers as the test says: at once, later through a pipe, never, or with an error.

    This holds from ATTEMPT on; before it, and for `at once`, it answers at once.
    """

    def __init__(self, plan: Callable[[int], LaunchPlan], wanted: dict[str, Any]) -> None:
        self._plan = plan
        self._how = wanted.get("gathering", "at once")
        self._from = wanted.get("gathering_from", 0)
        self._folder = Path(wanted["folder"])
        self.timeout_s = wanted.get("timeout_s", 600.0)
        self.progress_s = wanted.get("progress_s", 10.0)
        self._read_fd = -1

    def begin(self, attempt: int, waiting: Waiting, answer: Answer) -> None:
        """Gather."""
        how = self._how if attempt >= self._from else "at once"
        (self._folder / f"gathering.{attempt}").touch()
        match how:
            case "at once":
                answer(self._plan(attempt))
            case "later":
                # Another host, which comes when the test wants.
                self._read_fd = os.open(self._folder / "hosts", os.O_RDONLY | os.O_NONBLOCK)
                waiting.watch(self._read_fd, partial(self._on_host, attempt, waiting, answer))
            case "fails":
                raise EnvironmentFault("Port 6070 is taken.")
            case "breaks":
                waiting.timer("break", 0.0, partial(os.close, -1))
            case "never":
                pass
            case _:
                raise AssertionError(how)

    def _on_host(self, attempt: int, waiting: Waiting, answer: Answer) -> None:
        if os.read(self._read_fd, 1):
            waiting.unwatch(self._read_fd)
            answer(self._plan(attempt))

    def missing(self) -> str:
        """Return the missing host."""
        return "10.0.0.2"

    def cancel(self) -> None:
        """Note that the wait is over."""
        (self._folder / "cancelled").touch()


def plan(wanted: dict[str, Any], attempt: int) -> LaunchPlan:
    """Return the plan of ATTEMPT, which may have its own commands."""
    generations = wanted.get("generations", [wanted["commands"]])
    commands = generations[min(attempt, len(generations) - 1)]
    ranks = [
        RankSpec("TRAINER", i, i, 0, (), Endpoint("127.0.0.1", 6070 + i))
        for i in range(len(commands))
    ]
    essential = wanted.get("essential", [True] * len(ranks))
    folder = wanted["folder"]
    run = wanted.get("run", f"run-{os.getpid()}")
    strategy = wanted.get("strategy")
    records = f"log/runs/{run}/rank" if strategy else None
    processes = tuple(
        ProcessSpec(
            name=f"trainer.{rank.rank}",
            argv=tuple(command),
            env={
                "PADDLE_TRAINER_ID": str(rank.rank),
                **({"FLEETRUN_RECORDS": f"{records}.{rank.rank}.jsonl"} if records else {}),
                **wanted.get("env", {}),
            },
            unset=("DROP_ME",),
            log=f"workerlog.{rank.rank}",
            essential=is_essential,
            rank=rank,
        )
        for rank, command, is_essential in zip(ranks, commands, essential, strict=True)
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
        rules=Rules(
            wanted.get("grace_s", 5.0),
            wanted.get("max_restarts", 0),
            wanted.get("backoff_s", 1.0),
            wanted.get("hang_timeout_s", 0.0),
        ),
        cwd=folder,
        log_dir=f"{folder}/log",
        run_dir=f"{folder}/log/runs/{run}",
        files={f"log/runs/{run}/strategy.json": json.dumps(strategy)} if strategy else {},
    )


class DrivenJob(ObservedJob):
    """The job of a test."""

    def __init__(self, wanted: dict[str, Any], keeper: Keeper) -> None:
        preface = wanted.get("preface")
        self._messages = Messages(None if preface is None else lambda: preface)
        self._wanted = wanted
        tee = wanted.get("tee", [0])
        request = Request(
            Script("file", "train.py", ()),
            tee=tee if tee == "all" else ",".join(map(str, tee)),
            log_keep=wanted.get("keep", 20),
            log_overwrite=wanted.get("overwrite", False),
        )
        log, show = self._messages.log, self._messages.show
        super().__init__(request, {}, log=log, show=show, keeper=keeper)

    def observing(self) -> list[Sink | Source]:
        """Return the observers that show the job, and the one that breaks it."""
        wanted = self._wanted
        observers: list[Sink | Source] = [self._messages, RunDirectory(self)]
        observers += [EventLog(self), Console(self)]
        if wanted.get("hang_timeout_s"):
            observers.append(Watch(self))
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
    console._TIMEOUT_S = wanted.get("patience_s", console._TIMEOUT_S)
    try:
        job = DrivenJob(wanted, keep())
        supervisor = Supervisor(Hosts(partial(plan, wanted), wanted), job)
        return supervisor.run().exit_code
    except FleetrunError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
