"""Who takes part in a job with parameter servers: read from numbers and lists of endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Endpoint
from fleetrun.plan import hosts, origin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.model import Facts, Request

# As Paddle's TRAINING_ROLE calls them.
SERVER, TRAINER, HETER, COORDINATOR = "PSERVER", "TRAINER", "HETER_TRAINER", "COORDINATOR"
# No process but a port: the first server lets the trainers' gloo meet there.
MEETING = "MEETING"

# Where Paddle counts from when a list has no ports and there is no --start_port.
FIRST_PORT = 6170

_MODES = hosts.SERVER_MODES
_HETER_MODES = ("ps-heter", "heter")
# What a cluster may call this node, and the variable that lists all of its kind.
_ROLES = {
    SERVER: "PADDLE_PSERVERS_IP_PORT_LIST",
    TRAINER: "PADDLE_TRAINER_ENDPOINTS",
    HETER: "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST",
    COORDINATOR: "PADDLE_COORDINATOR_ENDPOINTS",
}
_KINDS_OF_DEVICE = ("cpu", "gpu", "xpu")
_LAST_PORT = 65535


class Seat(NamedTuple):
    """A place that the job has to fill; a host or a port of None is for the engine to give.

    `stage` counts as Paddle does: trainers are the first, heterogeneous trainers come after.
    """

    role: str
    stage: int = 0
    host: str | None = None
    port: int | None = None


class Crew(NamedTuple):
    """All seats, in the order of Paddle's ports: the n-th has port START + n if nobody says else.

    When the seats name no hosts, every host of the job has all of them.
    """

    seats: tuple[Seat, ...]
    # What the heterogeneous trainers of each stage run on, from the second stage on.
    heter_devices: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that are named, in the order that they have in the job."""
        return tuple(dict.fromkeys(seat.host for seat in self.seats if seat.host is not None))

    @property
    def stages(self) -> int:
        """How many stages there are: 1 without heterogeneous trainers."""
        return max(seat.stage for seat in self.seats)


class Post(NamedTuple):
    """The one process of a node that a cluster has told its role; it tells it the rest, too."""

    role: str
    rank: int
    endpoint: Endpoint


def wanted(request: Request) -> bool:
    """Say whether REQUEST is for a job with parameter servers; the script's words never count."""
    return request.run_mode in _MODES or any(getattr(request, name) for name in hosts.SERVER_FIELDS)


def crew(request: Request) -> Crew:
    """Return everybody whom REQUEST asks for; UsageError where its parts disagree."""
    servers = _seats(request, SERVER, "server_num", "servers")
    trainers = _seats(request, TRAINER, "trainer_num", "trainers")
    # As with Paddle: the side that nobody counts or lists is one; on the first host of the other.
    first = next((seat.host for seat in (*servers, *trainers)), None)
    servers = servers or (Seat(SERVER, 0, first),)
    trainers = trainers or (Seat(TRAINER, 1, first),)
    heter = _heter(request)
    devices = _heter_devices(request, max((seat.stage for seat in heter), default=1) - 1)
    coordinators = _seats(request, COORDINATOR, "coordinator_num", "coordinators")
    meeting = Seat(MEETING, host=servers[0].host, port=_meeting_port(request))
    found = (*servers, *trainers, *heter, meeting, *coordinators)
    return Crew(_housed(request, found), devices)


def supplied(request: Request) -> tuple[str, ...]:
    """Say which side nobody counts or lists: `crew` takes one there."""
    sides = (
        ("parameter servers", "server_num", "servers"),
        ("trainers", "trainer_num", "trainers"),
    )
    return tuple(
        f"nobody says how many {what} there are: one starts; --{number} counts them."
        for what, number, listed in sides
        if getattr(request, number) is None and not getattr(request, listed)
    )


def ports(found: Crew, start_port: int | None) -> tuple[tuple[int | None, ...], ...]:
    """Return each named host's ports, seat by seat; None where any free one will do.

    Several hosts cannot ask each other, so all count from the same port and skip the same ones.
    Where no host is named there is one row: each host of the job has these.
    """
    first = start_port
    if first is None and len(found.hosts) > 1:
        first = FIRST_PORT
    taken = {(seat.host, seat.port) for seat in found.seats}
    each: dict[str | None, list[int | None]] = {host: [] for host in found.hosts or (None,)}
    for offset, seat in enumerate(found.seats):
        port = seat.port
        if port is None and first is not None:
            port = first + offset
            while (seat.host, port) in taken:
                port += 1
            if port > _LAST_PORT:
                raise UsageError(
                    f"{len(found.seats)} ports from {first} on do not fit below {_LAST_PORT}; "
                    "give a lower --start_port."
                )
            taken.add((seat.host, port))
        each[seat.host].append(port)
    return tuple(tuple(own) for own in each.values())


def named(request: Request, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the job in order: those of the lists, or else those of --ips."""
    if post(request, environ) is not None:
        return ()
    found = crew(request).hosts
    if not found:
        return hosts.listed(request)
    if request.nnodes not in {"1", str(len(found))}:
        raise UsageError(
            f"{origin.option(request, 'nnodes')}: the lists of servers and trainers name "
            f"{len(found)} host{'s' * (len(found) > 1)}; leave --nnodes out."
        )
    return found


def post(request: Request, environ: Mapping[str, str]) -> Post | None:
    """Return what a cluster's variables say this node is, when no option says who takes part."""
    if request.run_mode not in _MODES or any(
        getattr(request, name) for name in hosts.SERVER_FIELDS
    ):
        return None
    role = environ.get("TRAINING_ROLE", "").strip()
    if not role or not environ.get("PADDLE_PSERVERS_IP_PORT_LIST", "").strip():
        return None
    if role not in _ROLES:
        raise EnvironmentFault(
            f"TRAINING_ROLE={role} is none of {', '.join(_ROLES)}; it comes from the cluster. "
            "Unset it to do without, and give --server_num and --trainer_num."
        )
    listed = _listed(environ, role)
    host = environ.get("POD_IP", "").strip() or "127.0.0.1"
    port = environ.get("PADDLE_PORT", "").strip()
    if role == SERVER and f"{host}:{port}" not in listed:
        raise EnvironmentFault(
            f"POD_IP={environ.get('POD_IP', '')} and PADDLE_PORT={port} are no server of "
            f"PADDLE_PSERVERS_IP_PORT_LIST={','.join(listed)}; a server must know which it is."
        )
    rank = environ.get("PADDLE_TRAINER_ID", "").strip()
    if role == TRAINER and not _is_number(rank):
        raise EnvironmentFault(
            f"PADDLE_TRAINER_ID={rank} is not a number; the cluster says that this is a trainer, "
            "and a trainer must know which it is."
        )
    here = f"{host}:{port}"
    place = int(rank) if _is_number(rank) else listed.index(here) if here in listed else 0
    if role == SERVER:
        place = listed.index(here)
    return Post(role, place, Endpoint(host, int(port) if _is_number(port) else 0))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _listed(environ: Mapping[str, str], role: str) -> list[str]:
    """Return the endpoints of ROLE, as the cluster lists them."""
    text = environ.get(_ROLES[role], "")
    return [piece.strip() for piece in text.split(",") if piece.strip()]


def check_paddle(request: Request, facts: Facts) -> tuple[str, ...]:
    """Say, or refuse, when the Paddle that is here lacks what a mode with servers or rpc needs."""
    version, what = facts.paddle_without_servers, "parameter servers"
    if request.run_mode == "rpc":
        version, what = facts.paddle_without_rpc, "paddle.distributed.rpc"
    if version is None:
        return ()
    said = (
        f"Paddle {version} here was built without {what}: use paddlepaddle 2.6.2, which has "
        f"{'it' if request.run_mode == 'rpc' else 'them'} (pip install paddlepaddle==2.6.2)."
    )
    # A script that does not name Paddle may do without it, and a dry run may be for elsewhere.
    if facts.script_imports_paddle and request.dry_run is None:
        raise EnvironmentFault(said)
    return (said,)


def _seats(request: Request, role: str, number: str, listed: str) -> tuple[Seat, ...]:
    """Return the seats of ROLE that the option NUMBER counts and the option LISTED names."""
    count: int | None = getattr(request, number)
    if count is not None and count < 0:
        raise UsageError(f"{origin.option(request, number)}: give a number, 1 or more.")
    stage = 1 if role == TRAINER else 0
    seats = tuple(_seat(request, listed, text, role, stage) for text in getattr(request, listed))
    if count == 0 and not seats and role in {SERVER, TRAINER}:
        what = "parameter servers" if role == SERVER else "trainers"
        raise UsageError(
            f"{origin.option(request, number)}: such a job needs {what}; leave it out to get one."
        )
    if not seats:
        return (Seat(role, stage),) * (count or 0)
    if count and count != len(seats):
        raise UsageError(
            f"{origin.option(request, listed)} names {len(seats)}, and "
            f"{origin.option(request, number)} says {count}; leave one of the two out."
        )
    return seats


def _seat(request: Request, listed: str, text: str, role: str, stage: int) -> Seat:
    """Read TEXT of the option LISTED: HOST or HOST:PORT."""
    host, colon, port = text.strip().partition(":")
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not host or (colon and not 1 <= number <= _LAST_PORT):
        raise UsageError(
            f"{origin.option(request, listed)}: `{text.strip()}` is not HOST:PORT or HOST; "
            f"a port is from 1 to {_LAST_PORT}, and Paddle reads no IPv6."
        )
    return Seat(role, stage, host, number if colon else None)


def _heter(request: Request) -> tuple[Seat, ...]:
    """Return the heterogeneous trainers, stage by stage; stages are parted by `;`."""
    counts = _stage_counts(request)
    if request.heter_workers is None:
        if request.run_mode in _HETER_MODES and not counts:
            raise UsageError(
                f"{origin.option(request, 'run_mode')} needs heterogeneous trainers, and nobody "
                "names any: --heter_worker_num or --heter_workers."
            )
        return tuple(
            Seat(HETER, stage) for stage, each in enumerate(counts, 2) for _ in range(each)
        )
    stages = [stage.split(",") for stage in request.heter_workers.split(";")]
    if counts and counts != tuple(len(stage) for stage in stages):
        raise UsageError(
            f"{origin.option(request, 'heter_workers')} names "
            f"{';'.join(str(len(stage)) for stage in stages)}, and "
            f"{origin.option(request, 'heter_worker_num')} says otherwise; leave one of the two "
            "out."
        )
    return tuple(
        _seat(request, "heter_workers", text, HETER, number)
        for number, stage in enumerate(stages, 2)
        for text in stage
    )


def _stage_counts(request: Request) -> tuple[int, ...]:
    """Return how many heterogeneous trainers each stage has, by number; () for none."""
    if request.heter_worker_num is None or request.heter_worker_num.strip() == "0":
        return ()
    texts = [text.strip() for text in request.heter_worker_num.split(";")]
    if not all(text.isascii() and text.isdigit() and int(text) for text in texts):
        raise UsageError(
            f"{origin.option(request, 'heter_worker_num')}: give a number for each stage, 1 or "
            'more, such as 2 or "1;2".'
        )
    return tuple(int(text) for text in texts)


def _heter_devices(request: Request, stages: int) -> tuple[str, ...]:
    """Return what each of the heterogeneous STAGES runs on; () when nobody says."""
    if request.heter_devices is None:
        return ()
    devices = tuple(text.strip().lower() for text in request.heter_devices.split(";"))
    option = origin.option(request, "heter_devices")
    for device in devices:
        if device not in _KINDS_OF_DEVICE:
            raise UsageError(f"{option}: `{device}` is none of {', '.join(_KINDS_OF_DEVICE)}.")
    if len(devices) != stages:
        raise UsageError(
            f"{option} names {len(devices)}, and there are {stages} stages of heterogeneous "
            "trainers (--heter_worker_num, --heter_workers); name one for each."
        )
    return devices


def _meeting_port(request: Request) -> int | None:
    """Return the port where gloo meets, which Paddle's two launchers call by two names."""
    if request.http_port and request.gloo_port and request.http_port != request.gloo_port:
        raise UsageError(
            f"{origin.option(request, 'http_port')} and {origin.option(request, 'gloo_port')} are "
            "two names for one port; give one of them."
        )
    return request.http_port or request.gloo_port


def _housed(request: Request, seats: tuple[Seat, ...]) -> tuple[Seat, ...]:
    """Give every seat a host if any has one, and check what the lists say together."""
    named = tuple(dict.fromkeys(seat.host for seat in seats if seat.host is not None))
    for host in request.ips if named else ():
        if host not in named:
            raise UsageError(
                f"{origin.option(request, 'ips')}: {host} is in none of the lists of servers and "
                "trainers; they say which hosts take part, so leave --ips out."
            )
    lost = [seat.role for seat in seats if seat.host is None and seat.role != MEETING]
    if len(named) > 1:
        near = [host for host in named if hosts.is_loopback(host)]
        if near and len(near) < len(named):
            raise UsageError(
                f"The lists name {near[0]}, which is only this host to itself, together with "
                f"{next(host for host in named if host not in near)}: give the address that other "
                "hosts know."
            )
        if lost:
            number = {SERVER: "servers", TRAINER: "trainers", COORDINATOR: "coordinators"}
            flag = number.get(lost[0], "heter_workers")
            raise UsageError(
                f"The lists name {len(named)} hosts ({', '.join(named)}), and nobody says which of "
                f"them the {flag} run on: list them with --{flag}."
            )
    if named:
        # A number beside a list of one host means that host; gloo meets at the first server.
        seats = tuple(seat._replace(host=seat.host or seats[0].host or named[0]) for seat in seats)
    _check_distinct(seats)
    return seats


def _check_distinct(seats: tuple[Seat, ...]) -> None:
    """Complain when two have the same endpoint."""
    given = [(seat.host, seat.port) for seat in seats if seat.port is not None]
    for host, port in given:
        if given.count((host, port)) > 1:
            where = f"The endpoint {host}:{port}" if host else f"Port {port}"
            raise UsageError(f"{where} is given twice; servers, trainers and gloo need their own.")
