"""How long a restart took, phase by phase."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import plans
import pytest
from timers import Timers

from fleetrun.model import ExitStatus
from fleetrun.run.events import Exited, Finished, Gathered, Outcome, Recovered, Started
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
