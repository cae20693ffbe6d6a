"""The table of ranks' variables equals the variables in plans of all modes."""

from __future__ import annotations

from collections import defaultdict

import reference_tables
from plans import a_request, known_gpus, planned, some_facts

from fleetrun.model import Facts, LaunchPlan, Processors, Request
from fleetrun.plan import modes

IPS = {"ips": ("10.0.0.1", "10.0.0.2")}
SERVERS = {"run_mode": "ps", "server_num": 1, "trainer_num": 2}
MIG = {"gpus": known_gpus("GPU-a", instances=[("MIG-1", "MIG-2")])}


def npus(kind: str) -> Facts:
    return some_facts(device_counts={kind: 2})


# Launches that set every variable together.
LAUNCHES: tuple[tuple[Request, Facts], ...] = (
    (a_request(bind="cores"), some_facts(2, processors=Processors(((0,), (1,)), (0, 0)))),
    (a_request(**IPS, host="10.0.0.1"), some_facts(2, environ={"http_proxy": "http://p"})),
    (a_request(**IPS), some_facts(2, peer_interface="eth0", hcas=("mlx5_0",), rdma=("mlx5_0",))),
    (a_request(), some_facts(1, **MIG)),
    (a_request(), npus("npu")),
    (a_request(), npus("xpu")),
    (a_request(), some_facts(has_plugins=True)),
    (a_request(**SERVERS), some_facts(2)),
    (a_request(**SERVERS, coordinator_num=1), npus("npu")),
    (a_request(**SERVERS, heter_worker_num="2"), npus("xpu")),
    (a_request(run_mode="rpc", nproc_per_node=2), some_facts()),
)
ROWS = {(mode, row.name): row for row in reference_tables.OF_RANKS for mode in row.modes}


def set_by(plan: LaunchPlan) -> set[str]:
    """Return the variables that PLAN sets, except fleetrun's own."""
    own = {row.name for row in reference_tables.OWN}
    return {name for process in plan.processes for name in process.env} - own


def test_plans_of_all_modes_set_what_the_table_says_and_nothing_else() -> None:
    modes_of = defaultdict[str, set[str]](set)
    for request, facts in LAUNCHES:
        modes_of[request.run_mode] |= set_by(planned(request, facts))
    assert modes_of.keys() == {mode.name for mode in modes.MODES} == set(reference_tables.ALL)
    for mode, names in modes_of.items():
        # What depends on devices or options alone is seen in one mode.
        told = {name for where, name in ROWS if where == mode}
        assert names <= told
        missing = told - names
        assert all(ROWS[mode, name].modes == reference_tables.ALL for name in missing)
    assert {name for _, name in ROWS} == set().union(*modes_of.values())
