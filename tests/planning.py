"""Requests, facts and rosters for tests: ordinary ones with the fields of a test replaced."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from fleetrun import engines
from fleetrun.model import (
    Address,
    Device,
    Endpoint,
    Facts,
    Gpu,
    Member,
    Request,
    Roster,
    Script,
    Setting,
)
from fleetrun.plan import planner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.model import LaunchPlan


def a_request(**fields: Any) -> Request:
    """Make a request for `train.py` with FIELDS."""
    return Request(Script("file", "train.py", ("--lr", "0.1")))._replace(**fields)


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
    engine = engines.find(request, facts.environ, planner.places(request))
    with closing(engine.ports(facts.pid)) as ports:
        return engine.assign(ports, request, facts, slots)


def planned(request: Request, facts: Facts, *, dry: bool = True) -> LaunchPlan:
    """Plan REQUEST on the hosts that are gathered for it."""
    roster = gathered(request, facts, dry=dry)
    return planner.plan(request, facts, planner.share(request, facts), roster)
