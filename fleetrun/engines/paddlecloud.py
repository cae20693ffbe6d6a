"""Hosts and roles that PaddleCloud, or Kubernetes' Paddle operator, gives in variables.

For trainers they name all hosts. For jobs with parameter servers they start one process on each
host, with its role and all endpoints in its variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetrun.engines import listed
from fleetrun.engines.ports import Ports
from fleetrun.errors import EnvironmentFault
from fleetrun.model import (
    COORDINATOR,
    HETER,
    SERVER,
    TRAINER,
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
        has_role = environ.get("TRAINING_ROLE", "").strip()
        has_list = environ.get(_ROLES[SERVER], "").strip()
        return () if places.is_open and has_role and has_list else None
    is_ignored = request.ips and environ.get(_LAUNCH_WITH_ARGS) == "1"
    if is_ignored or not hosts.in_paddlecloud(environ):
        return None
    return tuple(name.strip() for name in environ["PADDLE_TRAINERS"].split(","))


def assign(places: ModeHosts, held: Ports, request: Request, facts: Facts, slots: Slots) -> Roster:
    """Return the hosts and ports, or this host's single process, as the variables say."""
    if places.has_roles:
        assigned, endpoint = role_of(facts.environ)
        member = Member(endpoint.host, (endpoint.port,), ((),))
        inherited = tuple(filter(is_identity, facts.environ))
        return Roster(
            (member,), 0, endpoint, engine="cloud", inherited=inherited, assigned=assigned
        )
    names = places.hosts
    rows = ports(names, facts.environ, request, slots)
    me = _number(facts.environ, "PADDLE_TRAINER_ID", len(names) - 1)
    notes: tuple[str, ...] = ()
    if request.ips and tuple(name.strip() for name in request.ips) != names:
        ignored = f"{origin.option(request, 'ips')} is ignored"
        why = f"PADDLE_TRAINERS={','.join(names)} from PaddleCloud wins, as in Paddle"
        notes = (f"{ignored}: {why}. Export {_LAUNCH_WITH_ARGS}=1 to use --ips.",)
    return listed.roster(held, names, me, rows, slots)._replace(notes=notes, inherited=_KEPT)


def ports(
    names: Sequence[str], environ: Mapping[str, str], request: Request, slots: Slots
) -> tuple[tuple[int | None, ...], ...]:
    """Return the ports of each of the hosts NAMES, for SLOTS on each."""
    ranks, ports_num = len(slots.slots), _number(environ, "TRAINER_PORTS_NUM")
    text = environ.get("DISTRIBUTED_TRAINER_ENDPOINTS", "")
    if text:
        endpoints = [piece.rpartition(":")[2] for piece in text.split(",")]
        numbers = [int(port) for port in endpoints if is_digits(port)]
        is_whole = (
            len(numbers) == len(names) * ports_num and max(numbers, default=0) <= hosts.LAST_PORT
        )
        if not is_whole or ranks > ports_num:
            raise EnvironmentFault(
                f"DISTRIBUTED_TRAINER_ENDPOINTS={text} must have TRAINER_PORTS_NUM={ports_num} "
                f"endpoints of each of the {len(names)} PADDLE_TRAINERS, for {ranks} ranks here."
            )
        starts = range(0, len(numbers), ports_num)
        return tuple(tuple(numbers[start : start + ranks]) for start in starts)
    has_port = environ.get("PADDLE_PORT") and ports_num >= ranks
    usable = _number(environ, "PADDLE_PORT") if has_port else None
    first = request.start_port or usable or _FIRST_PORT
    return layout.ports(slots, first, several=True) * len(names)


def _number(environ: Mapping[str, str], name: str, most: int = hosts.LAST_PORT) -> int:
    text = environ[name].strip()
    if not is_digits(text) or int(text) > most:
        raise EnvironmentFault(
            f"{name}={text} is not a number up to {most}; it comes from PaddleCloud. Unset "
            "PADDLE_TRAINERS to do without PaddleCloud."
        )
    return int(text)


def role_of(environ: Mapping[str, str]) -> tuple[tuple[str, int], Endpoint]:
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
    return (role, place), Endpoint(host, int(port) if is_digits(port) else 0)
