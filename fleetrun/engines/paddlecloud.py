"""Hosts and roles that PaddleCloud, or Kubernetes' Paddle operator, gives in variables.

For trainers they name all hosts. For jobs with parameter servers they start one process on each
host, with its role and all endpoints in its variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.engines import SelectedEngine, static
from fleetrun.engines.ports import Ports
from fleetrun.errors import EnvironmentFault
from fleetrun.model import (
    COORDINATOR,
    HETER,
    SERVER,
    TRAINER,
    Assigned,
    Endpoint,
    Facts,
    Member,
    Request,
    Roster,
)
from fleetrun.plan import hosts, layout, origin
from fleetrun.plan.environment import is_identity
from fleetrun.plan.layout import ModeHosts, Slots
from fleetrun.text import is_digits

# In plans, a host with a role; one of several trainers is `static`, as it knows the others.
NAME = "cloud"
# The first port if the variables name none.
_FIRST_PORT = 6170
# Its variables about the hosts, which the ranks keep.
_KEPT = ("DISTRIBUTED_TRAINER_ENDPOINTS", "PADDLE_PORT", "PADDLE_TRAINERS", "TRAINER_PORTS_NUM")
_LAUNCH_WITH_ARGS = "PADDLE_LAUNCH_WITH_ARGS"
# What a cluster may call this host, and the variable that lists all of its kind.
_ROLES = {
    SERVER: "PADDLE_PSERVERS_IP_PORT_LIST",
    TRAINER: "PADDLE_TRAINER_ENDPOINTS",
    HETER: "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST",
    COORDINATOR: "PADDLE_COORDINATOR_ENDPOINTS",
}


def find(request: Request, environ: Mapping[str, str], places: ModeHosts) -> tuple[str, ...] | None:
    """Return the hosts if the variables name several; none if they give this host its role.

    As in Paddle they override --ips, unless PADDLE_LAUNCH_WITH_ARGS=1.
    """
    if places.has_roles:
        if not places.is_open or not environ.get(_ROLES[SERVER], "").strip():
            return None
        if not environ.get("TRAINING_ROLE", "").strip():
            return None
        role_of(environ)
        return ()
    if request.ips and environ.get(_LAUNCH_WITH_ARGS) == "1":
        return None
    return read(environ).names if hosts.in_paddlecloud(environ) else None


def assign(
    engine: SelectedEngine, held: Ports, request: Request, facts: Facts, slots: Slots
) -> Roster:
    """Return the hosts and ports, or this host's single process, as the variables say."""
    if engine.places.has_roles:
        assigned, endpoint = role_of(facts.environ)
        member = Member(endpoint.host, (endpoint.port,), ((),))
        inherited = tuple(filter(is_identity, facts.environ))
        return Roster((member,), 0, endpoint, engine=NAME, inherited=inherited, assigned=assigned)
    cloud = read(facts.environ)
    roster = static.roster(held, cloud.names, cloud.me, ports(cloud, request, slots), slots)
    listed = tuple(name.strip() for name in request.ips)
    notes: tuple[str, ...] = ()
    if listed and listed != cloud.names:
        ignored = f"{origin.option(request, 'ips')} is ignored"
        why = f"PADDLE_TRAINERS={','.join(cloud.names)} from PaddleCloud wins, as in Paddle"
        notes = (f"{ignored}: {why}. Export {_LAUNCH_WITH_ARGS}=1 to use --ips.",)
    return roster._replace(notes=notes, inherited=_KEPT)


class Cloud(NamedTuple):
    """What PaddleCloud's variables say."""

    names: tuple[str, ...]
    me: int
    # The number of ports of each host, and the first one; or every endpoint, host by host.
    ports_num: int
    port: int | None
    endpoints: tuple[int, ...] = ()


def read(environ: Mapping[str, str]) -> Cloud:
    """Return what the variables say, checked."""

    def number(name: str, text: str, most: int = hosts.LAST_PORT) -> int:
        if not is_digits(text.strip()) or int(text) > most:
            raise EnvironmentFault(
                f"{name}={environ[name]}: {text} is not a number up to {most}; it comes from "
                "PaddleCloud. Unset PADDLE_TRAINERS to do without PaddleCloud."
            )
        return int(text)

    names = tuple(name.strip() for name in environ["PADDLE_TRAINERS"].split(","))
    me = number("PADDLE_TRAINER_ID", environ["PADDLE_TRAINER_ID"], len(names) - 1)
    ports_num = number("TRAINER_PORTS_NUM", environ["TRAINER_PORTS_NUM"])
    text = environ.get("DISTRIBUTED_TRAINER_ENDPOINTS", "")
    endpoints = tuple(
        number("DISTRIBUTED_TRAINER_ENDPOINTS", piece.rpartition(":")[2])
        for piece in (text.split(",") if text else ())
    )
    if text and len(endpoints) != len(names) * ports_num:
        raise EnvironmentFault(
            f"DISTRIBUTED_TRAINER_ENDPOINTS names {len(endpoints)} endpoints, but PADDLE_TRAINERS "
            f"and TRAINER_PORTS_NUM make {len(names) * ports_num}."
        )
    port = environ.get("PADDLE_PORT")
    return Cloud(names, me, ports_num, number("PADDLE_PORT", port) if port else None, endpoints)


def ports(cloud: Cloud, request: Request, slots: Slots) -> tuple[tuple[int | None, ...], ...]:
    """Return the ports of each host in PaddleCloud, for SLOTS on each."""
    ranks = len(slots.slots)
    if cloud.endpoints:
        if ranks > cloud.ports_num:
            raise EnvironmentFault(
                f"{ranks} ranks on this host, but DISTRIBUTED_TRAINER_ENDPOINTS has "
                f"{cloud.ports_num} endpoints for each host."
            )
        return tuple(
            cloud.endpoints[first : first + ranks]
            for first in range(0, len(cloud.endpoints), cloud.ports_num)
        )
    usable = cloud.port if cloud.ports_num >= ranks else None
    first = request.start_port or usable or _FIRST_PORT
    return layout.ports(slots, first, several=True) * len(cloud.names)


def role_of(environ: Mapping[str, str]) -> tuple[Assigned, Endpoint]:
    """Return the role, the rank and the endpoint that the cluster's variables give this host."""
    role = environ["TRAINING_ROLE"].strip()
    if role not in _ROLES:
        raise EnvironmentFault(
            f"TRAINING_ROLE={role} is not one of {', '.join(_ROLES)}; it comes from the cluster. "
            "Unset it to do without, and give --server_num and --trainer_num."
        )
    listed = [piece.strip() for piece in environ.get(_ROLES[role], "").split(",")]
    host = environ.get("POD_IP", "").strip() or "127.0.0.1"
    port = environ.get("PADDLE_PORT", "").strip()
    own, rank = f"{host}:{port}", environ.get("PADDLE_TRAINER_ID", "").strip()
    if (role == SERVER and own not in listed) or (role == TRAINER and not is_digits(rank)):
        raise EnvironmentFault(
            f"TRAINING_ROLE={role} with POD_IP={host}, PADDLE_PORT={port} and "
            f"PADDLE_TRAINER_ID={rank}: a server must be one of {_ROLES[SERVER]}, and a trainer "
            "needs a number."
        )
    place = listed.index(own) if own in listed else 0
    if is_digits(rank) and role != SERVER:
        place = int(rank)
    return Assigned(role, place), Endpoint(host, int(port) if is_digits(port) else 0)
