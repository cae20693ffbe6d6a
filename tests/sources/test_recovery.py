"""How long a restart took, phase by phase."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import plans
import pytest
from timers import Timers

from fleetrun.model import ExitStatus
from fleetrun.run.events import (
    Exited,
    Failure,
    Finished,
    Gathered,
    JobVerdict,
    Outcome,
    Recovered,
    Started,
    TimerExpired,
)
from fleetrun.sources.recovery import Recovery

if TYPE_CHECKING:
    from pathlib import Path

    from fleetrun.run.events import Declared


@pytest.mark.parametrize(
    ("generation", "started_s", "phases"),
    [
        # A host that joined in generation 1 counts its own attempts, and its ranks the job's.
        (2, 3.0, {"started": 1.0, "imported": 1.0, "first collective": 2.0}),
        # The rank may be faster than the launcher that waits for a processor to note its start.
        (1, 4.5, {"started": 2.0, "imported": 0.0, "first collective": 2.0}),
    ],
)
def test_phases_are_those_of_the_new_ranks_in_order(
    tmp_path: Path, generation: int, started_s: float, phases: dict[str, float]
) -> None:
    file = tmp_path / "rank.0.jsonl"
    env = {"FLEETRUN_RECORDS": str(file), "PADDLE_RESTART_COUNT": str(generation)}
    plan = plans.plan(per_node=1, cwd=str(tmp_path), run_dir=".", env=env)
    began = time.monotonic()
    # The rank before it, as it is known to the job, and the new one.
    moments = {generation - 1: (-9.0, -8.0), generation: (4.0, 6.0)}
    with file.open("w") as records:
        for restart, (imported_s, collective_s) in moments.items():
            for kind, at_s in (("imported", imported_s), ("first collective", collective_s)):
                record = {"kind": kind, "monotonic": began + at_s, "restart": restart, "schema": 1}
                records.write(json.dumps(record) + "\n")
    declared: list[Declared] = []
    timers: Any = Timers()
    recovery = Recovery(plans.job(plan, log=lambda _: None))
    recovery.open(timers, declared.append)
    recovery.on_event(Exited(0, "rank 0", ExitStatus(7), began))
    recovery.on_event(Gathered(1, plan, began + 2))
    recovery.on_event(Started(0, "rank 0", 1, began + started_s, 1))
    assert timers.elapse("look")
    recovery.on_event(Finished(Outcome(None), began + 7))
    [recovered] = declared
    assert isinstance(recovered, Recovered)
    assert {name: round(seconds, 3) for name, seconds in recovered.phases} == {
        "detected": 0.0,
        "stopped": 0.0,
        "agreed": 2.0,
        **phases,
    }
    assert [name for name, _ in recovered.phases][-3:] == [*phases]


def test_a_rank_that_ends_early_does_not_end_the_restart(tmp_path: Path) -> None:
    began, attempt = time.monotonic(), 1
    files = [tmp_path / f"rank.{rank}.jsonl" for rank in range(2)]
    plan = plans.plan(per_node=2, cwd=str(tmp_path), run_dir=".")
    restart = {"PADDLE_RESTART_COUNT": str(attempt)}
    processes = tuple(
        spec._replace(env={**restart, "FLEETRUN_RECORDS": str(file)})
        for spec, file in zip(plan.processes, files, strict=True)
    )
    plan = plan._replace(processes=processes)

    def imports(rank: int, at_s: float) -> None:
        record = {"kind": "imported", "monotonic": began + at_s, "restart": attempt, "schema": 1}
        files[rank].write_text(json.dumps(record) + "\n")

    declared: list[Declared] = []
    recovery = Recovery(plans.job(plan, log=lambda _: None))
    recovery.open(Timers(), declared.append)
    recovery.on_event(Exited(0, "rank 0", ExitStatus(7), began))
    recovery.on_event(Exited(1, "rank 1", ExitStatus(0), began + 1))
    recovery.on_event(Gathered(attempt, plan, began + 2))
    for rank in range(2):
        recovery.on_event(Started(rank, f"rank {rank}", 1, began + 3, attempt))
    imports(0, 4.0)
    recovery.on_event(Exited(0, "rank 0", ExitStatus(0), began + 5, attempt=attempt))
    assert not declared
    imports(1, 9.0)
    # The last one ends it, so that nothing is declared after the job's end.
    recovery.on_event(Exited(1, "rank 1", ExitStatus(0), began + 10, attempt=attempt))
    [recovered] = declared
    assert isinstance(recovered, Recovered)
    assert {name: round(seconds, 3) for name, seconds in recovered.phases} == {
        "detected": 0.0,
        "stopped": 1.0,
        "agreed": 1.0,
        "started": 1.0,
        "imported": 6.0,
    }


def test_the_wait_before_a_restart_is_a_phase_of_its_own(tmp_path: Path) -> None:
    plan = plans.plan(per_node=2, cwd=str(tmp_path), run_dir=".")
    declared: list[Declared] = []
    recovery = Recovery(plans.job(plan, log=lambda _: None))
    recovery.open(Timers(), declared.append)
    began = time.monotonic()
    recovery.on_event(Exited(0, "rank 0", ExitStatus(7), began - 2))
    # The first restart waits for nothing.
    recovery.on_event(TimerExpired(began - 1.5))
    recovery.on_event(Gathered(1, plan, began - 1))
    recovery.on_event(Started(0, "rank 0", 1, began, 1))
    recovery.on_event(Exited(0, "rank 0", ExitStatus(7), began, attempt=1))
    # The time to exit by itself has passed: that is no wait before a restart.
    recovery.on_event(TimerExpired(began + 0.5))
    recovery.on_event(Exited(1, "rank 1", ExitStatus(0), began + 1, attempt=1))
    # Until then another host has stopped its ranks.
    recovery.on_event(JobVerdict(Failure("a", "rank 0 exited with 7", 7), began + 3, 1))
    recovery.on_event(TimerExpired(began + 3.75))
    recovery.on_event(Gathered(2, plan, began + 4))
    recovery.on_event(Started(0, "rank 0", 1, began + 5, 2))
    recovery.on_event(Finished(Outcome(None), began + 7))
    first, recovered = declared
    assert isinstance(first, Recovered)
    assert isinstance(recovered, Recovered)
    assert "waited" not in dict(first.phases)
    assert {name: round(seconds, 3) for name, seconds in recovered.phases} == {
        "detected": 0.0,
        "stopped": 1.0,
        "waited": 0.75,
        "agreed": 2.25,
        "started": 1.0,
    }
