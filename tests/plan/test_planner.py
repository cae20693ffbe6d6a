"""The whole plan."""

from __future__ import annotations

import pytest
from plans import a_request, a_roster, some_facts

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import LaunchPlan, Rules, Script
from fleetrun.plan import planner
from fleetrun.plan.devices import Share


def test_a_plan_holds_everything() -> None:
    roster = a_roster(("10.0.0.1", "10.0.0.2"), me=1)._replace(
        engine="static", notes=("of the engine",), generation=4
    )
    request = a_request(
        job_id="night", log_dir="out/logs", grace_s=3.0, max_restart=2, notes=("of the request",)
    )
    facts = some_facts(8, program="train.py")
    made = Share("gpu", roster.members[1].groups, "nccl", ("of the devices",))
    plan = planner.plan(request, facts, made, roster)
    assert plan == LaunchPlan(
        job_id="night",
        mode="collective",
        engine="static",
        generation=4,
        node_rank=1,
        nodes=("10.0.0.1", "10.0.0.2"),
        ranks=plan.ranks,
        processes=plan.processes,
        rules=Rules(3.0, 2),
        cwd="/work",
        log_dir="/work/out/logs",
        run_dir="/work/out/logs/runs/20250102T030405Z-night-4711-node1",
        notes=("of the request", "of the devices", "of the engine"),
        has_session=True,
    )
    assert [spec.rank for spec in plan.ranks] == [0, 1, 2, 3]
    assert [process.name for process in plan.processes] == ["trainer.2", "trainer.3"]
    assert [process.log for process in plan.processes] == ["workerlog.0", "workerlog.1"]
    assert [process.rank for process in plan.processes] == list(plan.ranks[2:])
    assert plan.processes[1].env["PADDLE_GLOBAL_RANK"] == "3"
    assert plan.processes[1].argv == ("/usr/bin/python3", "-u", "train.py", "--lr", "0.1")


@pytest.mark.parametrize(
    ("per_host", "tee", "says"),
    [
        (1, "5", "--tee=5: there is no rank 5; the job has only rank 0."),
        (2, "0,4,5", "--tee=0,4,5: there is no rank 4; the job has ranks 0-3."),
    ],
)
def test_a_rank_that_the_job_does_not_have_cannot_be_shown(
    per_host: int, tee: str, says: str
) -> None:
    roster = a_roster(("10.0.0.1", "10.0.0.2"), per_host) if per_host > 1 else a_roster(ranks=1)
    made = Share("gpu", roster.members[0].groups, "nccl")
    with pytest.raises(UsageError) as caught:
        planner.plan(a_request(tee=tee), some_facts(8), made, roster)
    assert str(caught.value) == says


def test_ranks_get_no_address_that_paddle_cannot_read() -> None:
    """Such as that by which a host has called the master, whose name leads to IPv6."""
    roster = a_roster(("10.0.0.1", "fd00::2"), 1)
    facts = some_facts(1, program="train.py")
    with pytest.raises(
        EnvironmentFault, match="have the address fd00::2, and Paddle reads no IPv6"
    ):
        planner.plan(a_request(), facts, Share("gpu", roster.members[0].groups, "nccl"), roster)


def run_name(job_id: str) -> str:
    """Return the run directory's own name for a job."""
    roster = a_roster()
    made = Share("gpu", roster.members[0].groups, "nccl")
    plan = planner.plan(a_request(job_id=job_id, log_dir="/log"), some_facts(8), made, roster)
    return plan.run_dir.removeprefix("/log/runs/")


@pytest.mark.parametrize(
    ("job_id", "expected"),
    [("a-b_c.d", "a-b_c.d"), ("a b\n$", "a_b__"), ("x" * 300, "x" * 100), ("é" * 80, "é" * 50)],
)
def test_a_job_gives_its_name_to_the_run(job_id: str, expected: str) -> None:
    assert run_name(job_id) == f"20250102T030405Z-{expected}-4711"


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (Script("file", "jobs/train.py", ("7",)), "train"),
        (Script("module", "pkg.train", ()), "pkg.train"),
        (Script("file", "/bin/bash", ("-c", "train")), "bash"),
    ],
)
def test_a_job_without_a_name_is_called_after_what_trains(script: Script, name: str) -> None:
    request = a_request(script=script)
    assert planner.run_name(request, "t", 1) == f"t-{name}-1"


@pytest.mark.parametrize("job_id", ["", "a/b", ".", "..", "a\0"])
def test_a_job_that_is_no_name_is_refused(job_id: str) -> None:
    with pytest.raises(UsageError, match="names a folder in the logs"):
        run_name(job_id)


def test_hosts_that_take_free_gpus_take_the_same_number() -> None:
    roster = a_roster(("10.0.0.1", "10.0.0.2"))
    made = Share("gpu", roster.members[0].groups, "nccl")
    with pytest.raises(UsageError, match=r"--devices=free: .* add --nproc_per_node"):
        planner.plan(a_request(devices="free"), some_facts(8), made, roster)
    counted = a_request(devices="free", nproc_per_node=2)
    assert planner.plan(counted, some_facts(8), made, roster).processes
