"""A cluster that starts one process on each host, with its role and all endpoints in variables.

Kubernetes' Paddle operator and PaddleCloud do so for jobs with parameter servers.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetrun.engines import SelectedEngine
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
from fleetrun.plan.environment import is_identity
from fleetrun.plan.layout import ModeHosts, Slots
from fleetrun.text import is_digits

NAME = "cloud"

# What a cluster may call this node, and the variable that lists all of its kind.
_ROLES = {
    SERVER: "PADDLE_PSERVERS_IP_PORT_LIST",
    TRAINER: "PADDLE_TRAINER_ENDPOINTS",
    HETER: "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST",
    COORDINATOR: "PADDLE_COORDINATOR_ENDPOINTS",
}


def find(
    _request: Request, environ: Mapping[str, str], places: ModeHosts
) -> tuple[str, ...] | None:
    """Return no names if the cluster gives this process its role, and no option does."""
    if not (places.has_roles and places.is_open):
        return None
    read(environ)
    return ()


def assign(
    _engine: SelectedEngine, _held: Ports, _request: Request, facts: Facts, _slots: Slots
) -> Roster:
    """Return this host with its single process, whose role and port the cluster has chosen."""
    assigned, endpoint = read(facts.environ)
    member = Member(endpoint.host, (endpoint.port,), ((),))
    inherited = tuple(filter(is_identity, facts.environ))
    return Roster((member,), 0, endpoint, engine=NAME, inherited=inherited, assigned=assigned)


def read(environ: Mapping[str, str]) -> tuple[Assigned, Endpoint]:
    """Return the role, the rank and the endpoint that the cluster's variables give this host."""
    role = environ["TRAINING_ROLE"].strip()
    if role not in _ROLES:
        raise EnvironmentFault(
            f"TRAINING_ROLE={role} is not one of {', '.join(_ROLES)}; it comes from the cluster. "
            "Unset it to do without, and give --server_num and --trainer_num."
        )
    listed = _listed(environ, role)
    host = environ.get("POD_IP", "").strip() or "127.0.0.1"
    port = environ.get("PADDLE_PORT", "").strip()
    own = f"{host}:{port}"
    if role == SERVER and own not in listed:
        raise EnvironmentFault(
            f"POD_IP={environ.get('POD_IP', '')} and PADDLE_PORT={port} are not a server in "
            f"PADDLE_PSERVERS_IP_PORT_LIST={','.join(listed)}; a server must know which one it is."
        )
    rank = environ.get("PADDLE_TRAINER_ID", "").strip()
    if role == TRAINER and not is_digits(rank):
        raise EnvironmentFault(
            f"PADDLE_TRAINER_ID={rank} is not a number; the cluster says that this is a trainer, "
            "and a trainer must know which it is."
        )
    place = int(rank) if is_digits(rank) else listed.index(own) if own in listed else 0
    if role == SERVER:
        place = listed.index(own)
    return Assigned(role, place), Endpoint(host, int(port) if is_digits(port) else 0)


def _listed(environ: Mapping[str, str], role: str) -> list[str]:
    """Return the endpoints of ROLE, as the cluster lists them."""
    text = environ.get(_ROLES[role], "")
    return [piece.strip() for piece in text.split(",") if piece.strip()]
