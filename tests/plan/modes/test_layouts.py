"""Whole plans of jobs with roles: what lists, clusters and the modes themselves rule out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plans
import pytest
from plans import a_request, gathered, gpus, some_facts

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Address, LaunchPlan

if TYPE_CHECKING:
    from fleetrun.model import Facts, Request

SPREAD = a_request(
    run_mode="ps",
    servers=("10.0.0.1:6170", "10.0.0.2:6170"),
    trainers=("10.0.0.1:6171", "10.0.0.2:6171"),
)
ROLE = {"TRAINING_ROLE": "TRAINER", "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.9:1,10.0.0.1:2"}


def planned(request: Request, facts: Facts | None = None) -> LaunchPlan:
    """Plan REQUEST dryly, so that no port need be free here."""
    return plans.planned(request, facts or some_facts())


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


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"TRAINING_ROLE": "COOK"}, "TRAINING_ROLE=COOK is not one of"),
        ({"PADDLE_TRAINER_ID": "x"}, "PADDLE_TRAINER_ID=x: a server"),
        (
            {"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": "9"},
            "PADDLE_PORT=9 and PADDLE_TRAINER_ID=.*: a server must be one of",
        ),
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
