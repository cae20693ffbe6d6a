"""Which hosts take part, as the user or PaddleCloud names them, and which of them we are."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Endpoint, Facts, Request
from fleetrun.plan import origin

# Paddle's first port: with --ips, and in PaddleCloud when it names none.
FIRST_PORT = 6070
CLOUD_FIRST_PORT = 6170

# Jobs with parameter servers; their lists, not --ips, name the hosts.
SERVER_MODES = ("ps", "ps-heter", "heter")
# Any of these options makes the job one with parameter servers.
SERVER_FIELDS = (
    "server_num",
    "servers",
    "trainer_num",
    "trainers",
    "heter_worker_num",
    "heter_workers",
    "heter_devices",
    "coordinator_num",
    "coordinators",
)

_LAST_PORT = 65535
CLOUD = ("PADDLE_TRAINERS", "POD_IP", "PADDLE_TRAINER_ID", "TRAINER_PORTS_NUM")


class Cloud(NamedTuple):
    """What PaddleCloud's variables say."""

    names: tuple[str, ...]
    me: int
    # Ports that each host has for ranks, and where they begin; or every endpoint, host by host.
    ports_num: int
    port: int | None
    endpoints: tuple[Endpoint, ...] = ()


def named(request: Request, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the job in rank order; empty when nobody named any."""
    if request.run_mode in SERVER_MODES:
        # Only jobs with parameter servers pay for it; it imports us, too.
        from fleetrun.plan import servers  # noqa: PLC0415

        return servers.named(request, environ)
    found = cloud(request, environ)
    return found.names if found is not None else listed(request)


def listed(request: Request) -> tuple[str, ...]:
    """Return the hosts of --ips, checked."""
    names = tuple(name.strip() for name in request.ips)
    option = origin.option(request, "ips")
    for name in names:
        if not name:
            raise UsageError(f"{option}: an address is missing between two commas.")
        if ":" in name:
            raise UsageError(
                f"{option}: {name} is neither an IPv4 address nor a host name; Paddle reads no "
                "IPv6, and ports come from --start_port."
            )
        if names.count(name) > 1:
            raise UsageError(f"{option} names {name} twice; name each host once.")
    if len(names) > 1:
        near = [name for name in names if is_loopback(name)]
        if near and len(near) < len(names):
            raise UsageError(
                f"{option}: {near[0]} is only this host to itself; other hosts cannot reach it. "
                "Give the address that they know."
            )
        if request.nnodes not in {"1", str(len(names))}:
            raise UsageError(
                f"{origin.option(request, 'nnodes')} disagrees with {option}, "
                f"which names {len(names)} hosts; leave --nnodes out."
            )
    return names


def is_loopback(name: str) -> bool:
    """Say whether NAME means this host wherever it is read.

    >>> is_loopback("127.0.0.2"), is_loopback("localhost"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    return name == "localhost" or (name.startswith("127.") and is_address(name))


def is_address(name: str) -> bool:
    """Say whether NAME is an IPv4 address and not a host's name.

    >>> is_address("10.0.0.1"), is_address("10.0.0"), is_address("node1")
    (True, False, False)
    """
    parts = name.split(".")
    octets = [part for part in parts if part.isascii() and part.isdigit() and int(part) < 256]  # noqa: PLR2004 - an octet
    return len(parts) == len(octets) == 4  # noqa: PLR2004 - IPv4


def cloud(request: Request, environ: Mapping[str, str]) -> Cloud | None:
    """Return what PaddleCloud says about the hosts, where all its variables are set.

    As in Paddle it wins over --ips, unless PADDLE_LAUNCH_WITH_ARGS=1.
    """
    if request.ips and environ.get("PADDLE_LAUNCH_WITH_ARGS") == "1":
        return None
    if request.run_mode in SERVER_MODES:
        return None
    if not all(environ.get(name) for name in CLOUD) or environ.get("PADDLE_TRAINERS_NUM") == "1":
        return None
    names = tuple(name.strip() for name in environ["PADDLE_TRAINERS"].split(","))
    if len(names) == 1:
        return None
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
    if not (text.isascii() and text.isdigit()):
        raise EnvironmentFault(
            f"{name}={text} is not a number; it comes from PaddleCloud. "
            "Unset PADDLE_TRAINERS to do without PaddleCloud."
        )
    return int(text)


def _cloud_endpoints(environ: Mapping[str, str], expected: int) -> tuple[Endpoint, ...]:
    """Take DISTRIBUTED_TRAINER_ENDPOINTS apart."""
    text = environ["DISTRIBUTED_TRAINER_ENDPOINTS"]
    endpoints = []
    for piece in text.split(","):
        host, _, port = piece.strip().rpartition(":")
        if not (host and port.isascii() and port.isdigit()):
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


def cloud_ports(found: Cloud, request: Request, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the ports of each host in PaddleCloud, for RANKS ranks on each."""
    if found.endpoints:
        if ranks > found.ports_num:
            raise EnvironmentFault(
                f"{ranks} ranks on this host, but DISTRIBUTED_TRAINER_ENDPOINTS has "
                f"{found.ports_num} endpoints for each host."
            )
        return tuple(
            tuple(endpoint.port for endpoint in found.endpoints[first : first + ranks])
            for first in range(0, len(found.endpoints), found.ports_num)
        )
    first = request.start_port
    if first is None:
        usable = found.port is not None and found.ports_num >= ranks
        first = found.port if usable else CLOUD_FIRST_PORT
    return (port_range(first or CLOUD_FIRST_PORT, ranks),) * len(found.names)


def port_range(first: int, count: int) -> tuple[int, ...]:
    """Return COUNT ports from FIRST on."""
    if not 1 <= first <= _LAST_PORT + 1 - count:
        raise UsageError(
            f"{count} ports from {first} on do not fit below {_LAST_PORT}; give a lower "
            "--start_port."
        )
    return tuple(range(first, first + count))


def ours(name: str, facts: Facts) -> bool:
    """Say whether NAME is an address or a name of this host."""
    if is_loopback(name) or name == facts.hostname:
        return True
    own = {address.ip for address in facts.addresses}
    return name in own or any(ip in own or is_loopback(ip) for ip in facts.resolved.get(name, ()))


def place(
    names: Sequence[str], request: Request, facts: Facts, *, dry: bool
) -> tuple[int, tuple[str, ...]]:
    """Find which of NAMES this host is, and what there is to say about it.

    A dry run may be done from anywhere: there a stranger looks through the first host's eyes.
    """
    mine = [index for index, name in enumerate(names) if ours(name, facts)]
    notes: tuple[str, ...] = ()
    option = _lists(request)
    meant = [
        index
        for index, name in enumerate(names)
        if request.host is not None
        and (name == request.host or request.host in facts.resolved.get(name, ()))
    ]
    if meant:
        me = meant[0]
        if me not in mine:
            trusted = f"{origin.option(request, 'host')} is trusted, although this host has"
            notes = (f"{trusted} {_own(facts)}.",)
    elif request.host is not None and not _from_environment(request, "host"):
        raise UsageError(f"{origin.option(request, 'host')} is not one of {option}.")
    elif len(mine) == 1:
        me = mine[0]
    elif mine:
        both = " and ".join(names[index] for index in mine)
        raise EnvironmentFault(f"{option}: {both} are all this host; say which one with --host.")
    elif dry:
        return 0, (f"none of {option} is this host: shown as {names[0]} would see it.",)
    else:
        raise EnvironmentFault(
            f"{option}: none of them is this host, which has {_own(facts)}."
            f"{_unresolved(names, facts)} Run this on the hosts named, or say which one this is "
            "with --host."
        )
    if request.rank not in {None, -1, me}:
        raise UsageError(
            f"{origin.option(request, 'rank')} disagrees with {option}, where this host "
            f"({names[me]}) has place {me}; leave --rank out."
        )
    return me, notes


def _lists(request: Request) -> str:
    """Name the options that name the hosts."""
    given = [name for name in ("servers", "trainers", "heter_workers") if getattr(request, name)]
    if request.run_mode not in SERVER_MODES or not given:
        return origin.option(request, "ips")
    return " and ".join(origin.option(request, name) for name in given)


def _from_environment(request: Request, name: str) -> bool:
    """Say whether an option came from a variable, which may be meant for something else."""
    return any(
        setting.name == name and setting.source.startswith("$") for setting in request.settings
    )


def _own(facts: Facts) -> str:
    """Name our addresses and their interfaces; loopback and IPv6 cannot be meant."""
    own = [
        f"{address.ip} ({address.interface})"
        for address in facts.addresses
        if not is_loopback(address.ip) and ":" not in address.ip
    ]
    return ", ".join(own) or "no address but loopback"


def _unresolved(names: Sequence[str], facts: Facts) -> str:
    """Name those of NAMES that nobody could resolve, in a sentence."""
    lost = [name for name in names if facts.resolved.get(name) == ()]
    return f" {', '.join(lost)} cannot be resolved." if lost else ""
