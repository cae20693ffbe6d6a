"""Requests, facts, rosters and plans: ordinary ones with the fields of a test replaced."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetrun.engines.engine import Engine
from fleetrun.model import (
    Address,
    Device,
    Endpoint,
    Facts,
    Gpu,
    LaunchPlan,
    Member,
    ProcessSpec,
    RankSpec,
    Request,
    Roster,
    Rules,
    Script,
    Setting,
)
from fleetrun.plan import planner
from fleetrun.run.observers import ObservedJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GOLDEN = Path(__file__).parent / "golden"


def a_request(**fields: Any) -> Request:
    """Make a request for `train.py` with FIELDS."""
    return Request(Script("file", "train.py", ("--lr", "0.1")))._replace(**fields)


def request(**changes: Any) -> Request:
    """Make a request of two ranks whose options came from here and there, with CHANGES."""
    settings = (
        Setting("nproc_per_node", "2", "command line"),
        Setting("log_level", "debug", "$PADDLE_LOG_LEVEL"),
        Setting("ips", "", "default"),
        Setting("log_dir", "log", "default"),
        Setting("max_restart", "0", "default"),
    )
    return a_request(**{"nproc_per_node": 2, "settings": settings, **changes})


def plan(
    *,
    hosts: tuple[str, ...] = ("127.0.0.1",),
    node: int = 0,
    per_node: int = 2,
    argv: tuple[str, ...] = ("/usr/bin/python3", "-u", "train.py", "--lr", "0.1"),
    env: dict[str, str] | None = None,
    cwd: str = "/home/me/job",
    splits_logs: bool = False,
    **changes: object,
) -> LaunchPlan:
    ranks = tuple(
        RankSpec(
            role="TRAINER",
            rank=at * per_node + local,
            local_rank=local,
            node_rank=at,
            devices=(Device("gpu", str(4 + local), local),),
            endpoint=Endpoint(host, 6070 + local),
        )
        for at, host in enumerate(hosts)
        for local in range(per_node)
    )
    endpoints = ",".join(str(rank.endpoint) for rank in ranks)
    processes = tuple(
        ProcessSpec(
            name=f"trainer.{rank.rank}",
            argv=argv,
            env={
                "PADDLE_TRAINER_ID": str(rank.rank),
                "PADDLE_CURRENT_ENDPOINT": str(rank.endpoint),
                "PADDLE_TRAINERS_NUM": str(len(ranks)),
                "PADDLE_TRAINER_ENDPOINTS": endpoints,
                "FLAGS_selected_gpus": str(rank.local_rank),
                **(env or {}),
            },
            unset=("PADDLE_MASTER",),
            log=f"workerlog.{rank.local_rank}",
            error_log=f"workererr.{rank.local_rank}" if splits_logs else "",
            rank=rank,
        )
        for rank in ranks
        if rank.node_rank == node
    )
    made = LaunchPlan(
        job_id="default",
        mode="collective",
        engine="static" if len(hosts) > 1 else "local",
        generation=0,
        node_rank=node,
        nodes=hosts,
        ranks=ranks,
        processes=processes,
        rules=Rules(),
        cwd=cwd,
        log_dir="log",
        run_dir="log/runs/20261121T040700Z-default",
    )
    return made._replace(**changes)  # type: ignore[arg-type]


def from_variable(name: str, value: str, variable: str) -> tuple[Setting, ...]:
    """Make the settings of a request in which an option came from VARIABLE."""
    return (Setting("job_id", "default", "default"), Setting(name, value, f"${variable}"))


def some_facts(gpus: int = 0, /, **fields: Any) -> Facts:
    """Make the facts of a host with GPUS GPUs, and FIELDS."""
    return Facts(
        environ={},
        cwd="/work",
        hostname="node1",
        python="/usr/bin/python3",
        pid=4711,
        started_utc="20250102T030405Z",
        cpus=6,
        device_counts={"gpu": gpus} if gpus else {},
        addresses=(
            Address("lo", "127.0.0.1"),
            Address("lo", "::1"),
            Address("eth0", "10.0.0.1"),
            Address("eth0", "fe80::1"),
        ),
    )._replace(**fields)


def known_gpus(*uuids: str, instances: Sequence[tuple[str, ...]] = ()) -> tuple[Gpu, ...]:
    """Make what the driver tells of GPUs with UUIDS, each divided into some of INSTANCES."""
    parts = (*instances, *((),) * len(uuids))
    return tuple(
        Gpu(uuid, place, instances=tuple(map(Gpu, parts[place])))
        for place, uuid in enumerate(uuids)
    )


def gpus(*indexes: int) -> tuple[Device, ...]:
    """Make GPUs whose ids are their indexes."""
    return tuple(Device("gpu", str(index), index) for index in indexes)


def a_roster(
    hosts: Sequence[str] = ("127.0.0.1",), ranks: int = 2, me: int = 0, *, cpu: bool = False
) -> Roster:
    """Make a roster of HOSTS with RANKS ranks each, one GPU (or CPU) for each."""
    ports = tuple(range(6070, 6070 + ranks))
    groups = tuple(() if cpu else gpus(index) for index in range(ranks))
    members = tuple(Member(host, ports, groups) for host in hosts)
    return Roster(members, me, Endpoint(hosts[0], 7777))


def gathered(request: Request, facts: Facts, *, dry: bool = True) -> Roster:
    """Gather the hosts of REQUEST, dryly unless said otherwise, so that no port need be free."""
    request = request._replace(dry_run="table" if dry else None)
    slots = planner.slots(request, facts, planner.share(request, facts))
    engine = Engine.find(request, facts.environ, planner.places(request))
    with closing(engine.ports(facts.pid)) as ports:
        return engine.assign(ports, request, facts, slots)


def planned(request: Request, facts: Facts, *, dry: bool = True) -> LaunchPlan:
    """Plan REQUEST on the hosts that are gathered for it."""
    roster = gathered(request, facts, dry=dry)
    return planner.plan(request, facts, planner.share(request, facts), roster)


def refuse(text: str) -> None:
    raise AssertionError(text)


def job(
    made: LaunchPlan,
    *,
    log: Callable[[str], None] = refuse,
    asked: Request | None = None,
    **changes: object,
) -> ObservedJob:
    """Return the job of the plan MADE, for a request with CHANGES, which logs nothing."""
    begun = ObservedJob(asked or request(**changes), {}, log=log)
    begun.begin(made)
    return begun


def generation(essential: Sequence[bool], *, has_peers: bool = False) -> LaunchPlan:
    """Make a plan of processes that are essential or not."""
    processes = tuple(
        ProcessSpec(
            name=f"process.{index}",
            argv=(),
            env={},
            unset=(),
            log=f"workerlog.{index}",
            essential=is_essential,
        )
        for index, is_essential in enumerate(essential)
    )
    return plan(per_node=0, processes=processes, has_session=has_peers)


def assert_golden(name: str, text: str) -> None:
    """Compare TEXT with tests/golden/NAME; `UPDATE_GOLDEN=1` writes it anew, on purpose."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
