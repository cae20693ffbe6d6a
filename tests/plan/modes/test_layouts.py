"""Whole plans of jobs with roles: essential processes, waits, and removed variables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import planning
import pytest
from planning import a_request, gathered, gpus, some_facts

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Address, LaunchPlan
from fleetrun.plan import planner

if TYPE_CHECKING:
    from fleetrun.model import Facts, Request

TWO = a_request(run_mode="ps", server_num=2, trainer_num=2)
SPREAD = a_request(
    run_mode="ps",
    servers=("10.0.0.1:6170", "10.0.0.2:6170"),
    trainers=("10.0.0.1:6171", "10.0.0.2:6171"),
)
ROLE = {"TRAINING_ROLE": "TRAINER", "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.9:1,10.0.0.1:2"}


def planned(request: Request = TWO, facts: Facts | None = None) -> LaunchPlan:
    """Plan REQUEST dryly, so that no port need be free here."""
    return planning.planned(request, facts or some_facts())


def test_each_host_plans_its_part_of_the_lists() -> None:
    for me, host in enumerate(("10.0.0.1", "10.0.0.2")):
        facts = some_facts(addresses=(Address("eth0", host),))
        plan = planned(SPREAD, facts)
        assert plan.node_rank == me
        assert [process.name for process in plan.processes] == [f"server.{me}", f"trainer.{me}"]
        assert plan.processes[0].log == "serverlog.0"
        assert plan.has_session


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"nnodes": "3"}, "--nnodes=3: the lists of servers and trainers name 2 hosts"),
        ({"host": "10.0.0.7"}, "is not one of --servers="),
    ],
)
def test_messages_speak_of_the_lists(wanted: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        planned(SPREAD._replace(**wanted))  # type: ignore[arg-type]
    strange = some_facts(addresses=(Address("eth0", "10.0.0.5"),))
    with pytest.raises(EnvironmentFault, match=r"^--servers=.* and --trainers=.*: none of them"):
        gathered(SPREAD, strange, dry=False)


# -- what a cluster says -------------------------------------------------------------------------


def test_a_cluster_gives_a_node_its_one_process() -> None:
    environ = {**ROLE, "PADDLE_TRAINER_ID": "3", "PADDLE_TRAINERS_NUM": "4"}
    plan = planned(a_request(run_mode="ps", nnodes="6"), some_facts(2, environ=environ))
    (process,) = plan.processes
    assert (process.name, process.log, process.essential) == ("trainer.3", "workerlog.0", True)
    assert process.unset == ()
    assert not environ.keys() & process.env.keys()
    assert process.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert plan.engine == "cloud"


def test_a_clusters_server_finds_itself() -> None:
    told = {**ROLE, "TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.1", "PADDLE_PORT": "2"}
    (process,) = planned(a_request(run_mode="ps"), some_facts(2, environ=told)).processes
    assert (process.name, process.log) == ("server.1", "serverlog.0")
    assert process.env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"TRAINING_ROLE": "COOK"}, "TRAINING_ROLE=COOK is not one of"),
        ({"PADDLE_TRAINER_ID": "x"}, "PADDLE_TRAINER_ID=x is not a number"),
        ({"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": "9"}, "a server must know which one it is"),
    ],
)
def test_a_cluster_that_says_too_little_is_refused(told: dict[str, str], says: str) -> None:
    with pytest.raises(EnvironmentFault, match=says):
        planned(a_request(run_mode="ps"), some_facts(environ={**ROLE, **told}))


def test_heterogeneous_trainers_of_a_cluster_need_no_number() -> None:
    facts = some_facts(environ={**ROLE, "PADDLE_TRAINER_ID": "0"})
    assert planned(a_request(run_mode="ps-heter"), facts).processes[0].name == "trainer.0"
    with pytest.raises(UsageError, match="needs heterogeneous trainers: give --heter_worker_num"):
        planned(a_request(run_mode="ps-heter", server_num=1, trainer_num=1))


# -- the Paddle that is here ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (TWO, "parameter servers: use paddlepaddle 2.6.2, which has them"),
        (
            a_request(run_mode="rpc", nproc_per_node=2),
            "paddle.distributed.rpc: use paddlepaddle 2.6.2, which has it",
        ),
    ],
)
def test_a_paddle_that_lacks_the_modes_part_is_refused_where_it_is_sure_to_fail(
    wanted: Request, says: str
) -> None:
    facts = some_facts(paddle_lacking="3.3.1")
    note = f"Paddle 3.3.1 here was built without {says} (pip install paddlepaddle==2.6.2)."
    assert note in planned(wanted, facts).notes
    sure = facts._replace(script_imports_paddle=True)
    assert note in planned(wanted._replace(dry_run="json"), sure).notes
    # Before the launcher waits for other hosts.
    with pytest.raises(EnvironmentFault, match=re.escape(says)):
        planner.slots(wanted, sure, planner.share(wanted, sure))
    assert note not in planned(wanted).notes


# -- remote procedure calls ----------------------------------------------------------------------


def test_an_rpc_master_is_nobodys_own_port() -> None:
    for hosts in ((), ("10.0.0.1", "10.0.0.2")):
        request = a_request(run_mode="rpc", nproc_per_node=2, ips=hosts)
        plan = planned(request, some_facts(2))
        assert plan.mode == "rpc"
        env = plan.processes[0].env
        assert env["PADDLE_MASTER_ENDPOINT"] not in {str(spec.endpoint) for spec in plan.ranks}
        assert "PADDLE_GLOBAL_RANK" not in env
        assert plan.ranks[0].devices == gpus(0)
