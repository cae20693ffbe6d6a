"""The hosts of a job of trainers in PaddleCloud, which names them in variables."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.engines import SelectedEngine, static
from fleetrun.engines.ports import Ports
from fleetrun.errors import EnvironmentFault
from fleetrun.model import Endpoint, Facts, Request, Roster
from fleetrun.plan import hosts, layout, origin
from fleetrun.plan.layout import ModeHosts, Slots
from fleetrun.text import is_digits

# The name in plans: like the static engine, it knows the hosts from the start.
NAME = static.NAME

# The first port if the variables name none.
_FIRST_PORT = 6170

# Its variables about the hosts, which the ranks keep.
_KEPT = ("DISTRIBUTED_TRAINER_ENDPOINTS", "PADDLE_PORT", "PADDLE_TRAINERS", "TRAINER_PORTS_NUM")


class Cloud(NamedTuple):
    """What PaddleCloud's variables say."""

    names: tuple[str, ...]
    me: int
    # The number of ports of each host, and the first one; or every endpoint, host by host.
    ports_num: int
    port: int | None
    endpoints: tuple[Endpoint, ...] = ()


def find(request: Request, environ: Mapping[str, str], places: ModeHosts) -> tuple[str, ...] | None:
    """Return the hosts if the variables name several.

    As in Paddle they override --ips, unless PADDLE_LAUNCH_WITH_ARGS=1.
    """
    if request.ips and environ.get("PADDLE_LAUNCH_WITH_ARGS") == "1":
        return None
    # The variables only describe trainers.
    if places.has_roles or not hosts.in_paddlecloud(environ):
        return None
    return read(environ).names


def assign(
    _engine: "SelectedEngine", held: "Ports", request: Request, facts: "Facts", slots: Slots
) -> "Roster":
    """Return the hosts and ports that PaddleCloud's variables name."""
    cloud = read(facts.environ)
    rows = ports(cloud, request, slots)
    roster = static.roster(held, cloud.names, cloud.me, rows, slots)
    return roster._replace(notes=_overruled(request, cloud), inherited=_KEPT)


def read(environ: Mapping[str, str]) -> Cloud:
    """Return what the variables say, checked."""
    names = tuple(name.strip() for name in environ["PADDLE_TRAINERS"].split(","))
    me = _number(environ, "PADDLE_TRAINER_ID")
    ports_num = _number(environ, "TRAINER_PORTS_NUM")
    if me >= len(names):
        raise EnvironmentFault(
            f"PADDLE_TRAINER_ID={me}, but PADDLE_TRAINERS={environ['PADDLE_TRAINERS']} names "
            f"{len(names)} hosts, 0-{len(names) - 1}."
        )
    port = _number(environ, "PADDLE_PORT") if environ.get("PADDLE_PORT") else None
    endpoints: tuple[Endpoint, ...] = ()
    if environ.get("DISTRIBUTED_TRAINER_ENDPOINTS"):
        endpoints = _cloud_endpoints(environ, len(names) * ports_num)
    return Cloud(names, me, ports_num, port, endpoints)


def _number(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable of PaddleCloud."""
    text = environ[name].strip()
    if not is_digits(text):
        raise EnvironmentFault(
            f"{name}={text} is not a number; it comes from PaddleCloud. "
            "Unset PADDLE_TRAINERS to do without PaddleCloud."
        )
    return int(text)


def _cloud_endpoints(environ: Mapping[str, str], expected: int) -> tuple[Endpoint, ...]:
    """Parse DISTRIBUTED_TRAINER_ENDPOINTS."""
    text = environ["DISTRIBUTED_TRAINER_ENDPOINTS"]
    endpoints = []
    for piece in text.split(","):
        host, _, port = piece.strip().rpartition(":")
        if not (host and is_digits(port)):
            raise EnvironmentFault(
                f"DISTRIBUTED_TRAINER_ENDPOINTS={text}: {piece} is not HOST:PORT."
            )
        endpoints.append(Endpoint(host, int(port)))
    if len(endpoints) != expected:
        raise EnvironmentFault(
            f"DISTRIBUTED_TRAINER_ENDPOINTS names {len(endpoints)} endpoints, but PADDLE_TRAINERS "
            f"and TRAINER_PORTS_NUM make {expected}."
        )
    return tuple(endpoints)


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
            tuple(endpoint.port for endpoint in cloud.endpoints[first : first + ranks])
            for first in range(0, len(cloud.endpoints), cloud.ports_num)
        )
    first = request.start_port
    if first is None:
        usable = cloud.port is not None and cloud.ports_num >= ranks
        first = cloud.port if usable else _FIRST_PORT
    return layout.ports(slots, first or _FIRST_PORT, several=True) * len(cloud.names)


def _overruled(request: Request, cloud: Cloud) -> tuple[str, ...]:
    """Return the note that PaddleCloud's variables override --ips, if they do."""
    listed = tuple(name.strip() for name in request.ips)
    if not listed or listed == cloud.names:
        return ()
    note = (
        f"{origin.option(request, 'ips')} is ignored: PADDLE_TRAINERS={','.join(cloud.names)} "
        "from PaddleCloud wins, as in Paddle. Export PADDLE_LAUNCH_WITH_ARGS=1 to use --ips."
    )
    return (note,)
