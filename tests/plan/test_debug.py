"""Which ranks start under which debugger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from plans import a_request, a_roster, some_facts

from fleetrun.errors import UsageError
from fleetrun.model import Script
from fleetrun.plan import debug, planner
from fleetrun.plan.devices import Share

if TYPE_CHECKING:
    from fleetrun.model import Facts, LaunchPlan, Request

WITH_DEBUGPY = some_facts()


def planned(request: Request, facts: Facts, me: int = 0) -> LaunchPlan:
    """Return the plan of host ME of two, with two ranks on each."""
    roster = a_roster(("10.0.0.1", "10.0.0.2"), me=me)
    made = Share("gpu", roster.members[me].groups, "nccl")
    return planner.plan(request, facts, made, roster)


def listening(plan: LaunchPlan) -> list[str]:
    """Return where each process of PLAN waits for debugpy; "" for those that do not."""
    return [
        argv[argv.index("--listen") + 1] if "--listen" in argv else ""
        for argv in (process.argv for process in plan.processes)
    ]


def test_a_rank_waits_for_debugpy_where_it_runs_and_the_others_are_patient() -> None:
    request = a_request(debug="3", hang_timeout_s=60.0)
    here, there = planned(request, WITH_DEBUGPY), planned(request, WITH_DEBUGPY, me=1)
    assert listening(here) == ["", ""]
    assert listening(there) == ["", "127.0.0.1:5681"]
    assert there.processes[1].argv[-4:] == ("--wait-for-client", "train.py", "--lr", "0.1")
    assert there.notes[0].startswith("Ranks waiting for a debugger (attach with debugpy,")
    assert there.notes[0].endswith(": 3 at 127.0.0.1:5681.")
    assert here.notes == ()
    for process in (*here.processes, *there.processes):
        assert debug.VARIABLES.items() <= process.env.items()


@pytest.mark.parametrize(
    ("fields", "facts", "error", "says"),
    [
        ({"debug": "4"}, WITH_DEBUGPY, UsageError, "--debug=4: there is no rank 4; the job has"),
        (
            {"debug": "0", "script": Script("file", "./run.sh", ())},
            WITH_DEBUGPY,
            UsageError,
            "--debug=0: ./run.sh is a program; a debugger can hold scripts that end in .py",
        ),
    ],
)
def test_what_no_debugger_can_do_is_refused(
    fields: dict[str, object], facts: Facts, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        planned(a_request(**fields), facts)
    assert str(caught.value).startswith(says)
