"""The event file: every kind of event is written as documented."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import plans

from fleetrun.model import (
    Endpoint,
    ExitStatus,
    FieldVerdict,
    LaunchPlan,
    ProcessSpec,
    RankSpec,
    Rules,
)
from fleetrun.run.events import (
    Exited,
    Failure,
    Finished,
    Gathered,
    GatherFailed,
    Happening,
    HostStopped,
    Hung,
    Interrupted,
    JobVerdict,
    Outcome,
    Overdue,
    Recovered,
    RootCauses,
    RunWarning,
    SignalAll,
    SourceFailed,
    StacksRequested,
    Started,
    StopRequested,
    StrategyRejected,
    StrategyReport,
    TimerExpired,
)
from fleetrun.run.loop import Loop
from fleetrun.rundir import eventfile
from fleetrun.sinks.eventlog import EventLog


def a_plan(folder: Path) -> LaunchPlan:
    rank = RankSpec("TRAINER", 3, 0, 0, (), Endpoint("127.0.0.1", 6070))
    specs = (
        ProcessSpec("trainer.3", ("true",), {}, (), "workerlog.0", rank=rank),
        ProcessSpec("server.0", ("true",), {}, (), "serverlog.0"),
    )
    return LaunchPlan(
        "job", "ps", "local", 0, 0, ("h",), (rank,), specs, Rules(), str(folder), ".", "."
    )


def all_kinds(plan: LaunchPlan) -> list[Happening]:
    killed = Exited(0, "rank 3", ExitStatus(signum=9), 2.0, 11, attempt=1)
    return [
        Started(0, "rank 3", 11, 1.0),
        Started(1, "server 0", 12, 1.0),
        RunWarning("stopped", "rank 3 \udcff is stopped.", 1.5, ("rank 3",)),
        StacksRequested(1.6),
        Hung(30.0, 1.7, ((("rank 3",), "train.py:1"),), ("rank 3",), "stacks.*.txt"),
        Recovered(1, 0.3, 1.8),
        StrategyReport(
            (FieldVerdict("amp", "true", "", "no_word", who=("rank 3",)),), 1.8, ("rank 3",)
        ),
        StrategyRejected(("rank 3 left no evidence",), 1.9),
        StopRequested(Failure("10.0.0.2", "server 1 exited with 7", 7), 1.9),
        JobVerdict(None, 1.9),
        HostStopped(0, killed, ""),
        JobVerdict(Failure("10.0.0.2", "server 1 exited with 7", 7), 1.9),
        SourceFailed("the session", "a bug", 1.9),
        killed,
        Exited(1, "server 0", ExitStatus(code=127), 2.0, fault="there is no program."),
        Overdue(killed, 1.0),
        SignalAll(15),
        RootCauses((killed, killed._replace(failed_at=1.9, process=1)), 2.1),
        TimerExpired(2.1),
        Gathered(0, plan, 2.1),
        Gathered(1, plan, 2.2),
        GatherFailed(1, "Port 6070 is taken.", 3, 2.2),
        Interrupted(2, 2.3),
        Finished(Outcome(killed, (killed,), attempts=2, stuck=(1,), given_up="no progress"), 2.4),
    ]


def write(folder: Path) -> list[dict[str, object]]:
    plan = a_plan(folder)
    log = EventLog(plans.job(plan))
    log.open(Loop())
    for happening in all_kinds(plan):
        log.on_event(happening)
    log.close()
    return [json.loads(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]


def test_s71_every_kind_of_event_is_written(tmp_path: Path) -> None:
    assert {type(event) for event in all_kinds(a_plan(tmp_path))} == set(get_args(Happening))
    names = [event["event"] for event in write(tmp_path)]
    assert names == [
        "launched",
        "started",
        "started",
        "warning",
        "stacks_requested",
        "hung",
        "recovered",
        "strategy_report",
        "strategy_rejected",
        "peer_failed",
        "peers_done",
        "host_stopped",
        "job_verdict",
        "source_failed",
        "exited",
        "exited",
        "overdue",
        "signalled",
        "root_cause",
        "timer",
        "restarting",
        "start_failed",
        "interrupted",
        "finished",
    ]


def test_s71_every_event_and_key_is_documented(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
    events = page.partition("\n## Events\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", events, flags=re.MULTILINE)
    documented = {name: set(re.findall(r"`(\w+)`", keys)) for name, keys in rows}
    keys_of: dict[str, set[str]] = {}
    for event in write(tmp_path):
        assert event["schema"] == eventfile.SCHEMA == 2
        assert isinstance(event["time"], float)
        assert isinstance(event["monotonic"], float)
        keys = set(event) - {"schema", "time", "monotonic", "event"}
        keys_of.setdefault(str(event["event"]), set()).update(keys)
    assert keys_of == documented
