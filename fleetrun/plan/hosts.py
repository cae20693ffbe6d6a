"""Which hosts the user has named, and which of them is this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address

from fleetrun.errors import EnvironmentFault, StrangerFault, UsageError
from fleetrun.model import Address, Endpoint, Facts, Request
from fleetrun.plan import origin
from fleetrun.plan.layout import ModeHosts
from fleetrun.text import is_digits

LAST_PORT = 65535
# Seen with 2.6.2 and 3.3.1: both split endpoints at their colons, and resolve names to IPv4 alone.
NO_IPV6 = "Paddle reads no IPv6"
# Paddle reads the hosts of a job from the first of these that is set.
ENDPOINTS = ("DISTRIBUTED_TRAINER_ENDPOINTS", "PADDLE_TRAINER_ENDPOINTS")

# PaddleCloud sets all of these if there are several hosts.
PADDLECLOUD = ("PADDLE_TRAINERS", "POD_IP", "PADDLE_TRAINER_ID", "TRAINER_PORTS_NUM")


def in_paddlecloud(environ: Mapping[str, str]) -> bool:
    """Return whether PaddleCloud's variables name several hosts."""
    return (
        all(environ.get(name) for name in PADDLECLOUD)
        and "," in environ["PADDLE_TRAINERS"]
        and environ.get("PADDLE_TRAINERS_NUM") != "1"
    )


def listed(request: Request) -> tuple[str, ...]:
    """Return the hosts of --ips, checked."""
    names = tuple(name.strip() for name in request.ips)
    option = origin.option(request, "ips")
    known: set[str] = set()
    for name in names:
        if not name:
            raise UsageError(f"{option}: an address is missing between two commas.")
        if not is_host(name):
            raise UsageError(
                f"{option}: {name} is neither an IPv4 address nor a host name; {NO_IPV6}, and "
                "ports come from --start_port."
            )
        if name in known:
            raise UsageError(f"{option} names {name} twice; name each host once.")
        known.add(name)
    check_reachable(names, option)
    if len(names) > 1 and bounds(request.nnodes)[1] not in {1, len(names)}:
        raise UsageError(
            f"{origin.option(request, 'nnodes')} disagrees with {option}, which names "
            f"{len(names)} hosts; leave --nnodes out."
        )
    return names


def check_reachable(names: Sequence[str], option: str) -> None:
    """Raise UsageError if OPTION lists a loopback address among the hosts NAMES."""
    near = [name for name in names if is_loopback(name)]
    if near and len(near) < len(names):
        raise UsageError(
            f"{option}: {near[0]} is a loopback address, which other hosts cannot reach; give the "
            "one by which they reach this host."
        )


def meeting_point(text: str) -> Endpoint | None:
    """Return the rendezvous address of --master; None if it is not HOST:PORT.

    >>> meeting_point("http://node1:6170"), meeting_point("[fd00::1]:6170"), meeting_point("node1")
    (Endpoint(host='node1', port=6170), None, None)
    """
    host, colon, port = text.strip().removeprefix("http://").rstrip("/").rpartition(":")
    is_number = is_digits(port) and 1 <= int(port[:6]) <= LAST_PORT
    return Endpoint(host, int(port)) if colon and is_number and is_host(host) else None


def own_port(master: str | None) -> int | None:
    """Return the port of a MASTER without a host, 0 for any; None if it names a host.

    >>> own_port(":8080"), own_port(":0"), own_port("node1:8080"), own_port(":many")
    (8080, 0, None, None)
    """
    colon, port = (master or "").strip()[:1], (master or "").strip()[1:]
    is_number = is_digits(port) and int(port[:6]) <= LAST_PORT
    return int(port) if colon == ":" and is_number else None


def store_endpoints(text: str) -> tuple[Endpoint, ...] | None:
    """Return the members of the etcd in --master; None if there is none.

    >>> store_endpoints("etcd://node1:2379,10.0.0.2:2379")[1], store_endpoints("node1:2379")
    (Endpoint(host='10.0.0.2', port=2379), None)
    """
    scheme, mark, members = text.strip().partition("://")
    if not mark or scheme != "etcd":
        return None
    parsed = [meeting_point(endpoint) for endpoint in members.rstrip("/").split(",")]
    known = tuple(endpoint for endpoint in parsed if endpoint is not None)
    return known if len(known) == len(parsed) else None


def meets_at(request: Request) -> Endpoint | None:
    """Return where the hosts of REQUEST find each other; None if they are known by name."""
    if request.master is None or request.nnodes == "1" or request.ips:
        return None
    endpoints = store_endpoints(request.master)
    return endpoints[0] if endpoints else meeting_point(request.master)


def bounds(nnodes: str) -> tuple[int, int]:
    """Return the minimum and maximum number of hosts.

    >>> bounds("2:4"), bounds("3")
    ((2, 4), (3, 3))
    """
    low, _, high = nnodes.partition(":")
    return int(low), int(high or low)


def is_loopback(name: str) -> bool:
    """Return whether NAME is a loopback address or name.

    >>> is_loopback("127.0.0.2"), is_loopback("localhost"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    return name == "localhost" or (name.startswith("127.") and is_address(name))


def is_address(name: str) -> bool:
    """Return whether NAME is an IPv4 address, not a host name.

    >>> is_address("10.0.0.1"), is_address("10.0.0"), is_address("node1")
    (True, False, False)
    """
    try:
        return bool(IPv4Address(name))
    except ValueError:
        return False


def is_host(name: str) -> bool:
    """Return whether NAME can be an IPv4 address or a host's name (RFC 1123; underscores are seen).

    >>> is_host("10.0.0.1"), is_host("gpu_1.lan"), is_host("256.0.0.1"), is_host("a;b")
    (True, True, False, False)
    """
    if is_address(name):
        return True
    labels = name.removesuffix(".").split(".")
    # A last label of digits alone is a mistyped address.
    return not labels[-1].isdigit() and all(
        label.isascii() and label.replace("-", "a").replace("_", "a").isalnum() and label[0] != "-"
        for label in labels
    )


def is_ipv6(text: str) -> bool:
    """Return whether TEXT is an IPv6 address.

    >>> is_ipv6("fd00::1"), is_ipv6("node1:6100"), is_ipv6("10.0.0.1")
    (True, False, False)
    """
    try:
        return bool(IPv6Address(text))
    except ValueError:
        return False


def is_own(name: str, facts: Facts) -> bool:
    """Return whether NAME is an address or a name of this host."""
    if is_loopback(name) or name == facts.hostname:
        return True
    own_addresses = {address.ip for address in facts.addresses}
    return name in own_addresses or any(
        ip in own_addresses or is_loopback(ip) for ip in facts.resolved.get(name, ())
    )


def own_places(names: Sequence[str], facts: Facts) -> list[int]:
    """Return the indexes of NAMES that are this host."""
    return [index for index, name in enumerate(names) if is_own(name, facts)]


def place(places: ModeHosts, request: Request, facts: Facts) -> tuple[int, tuple[str, ...]]:
    """Find this host among those of PLACES, given by its options or --ips, and return remarks.

    A dry run works on any machine: one that is not listed plans as the first host.
    """
    names, dry = places.hosts, request.dry_run is not None
    own = own_places(names, facts)
    notes: tuple[str, ...] = ()
    option = " and ".join(origin.option(request, name) for name in places.options or ("ips",))
    host = origin.option(request, "host")
    given = [
        index
        for index, name in enumerate(names)
        if request.host is not None
        and (name == request.host or request.host in facts.resolved.get(name, ()))
    ]
    if given:
        me = given[0]
        if own and me not in own and not dry:
            raise UsageError(
                f"{host} is another host of {option}, where this one is {names[own[0]]}: give each "
                "host its own --host, or none."
            )
        if me not in own:
            notes = (f"{host} is trusted, although this host has {own_addresses(facts)}.",)
    # A variable such as $POD_IP may be set for another purpose.
    elif request.host is not None and not origin.source(request, "host").startswith("$"):
        raise UsageError(f"{host} is not one of {option}.")
    elif len(own) == 1:
        me = own[0]
    elif own:
        both = " and ".join(names[index] for index in own)
        # If no other host is named, nobody has to be told.
        fault = StrangerFault if len(own) == len(names) else EnvironmentFault
        raise fault(f"{option}: {both} are all this host; say which one with --host.")
    elif dry:
        return 0, (f"none of {option} is this host: shown as {names[0]} would see it.",)
    else:
        lost = [name for name in names if facts.resolved.get(name) == ()]
        unknown = f" {', '.join(lost)} cannot be resolved." if lost else ""
        raise StrangerFault(
            f"{option}: none of them is this host, which has {own_addresses(facts)}.{unknown} Run "
            "this on the hosts named, or say which one this is with --host."
        )
    if request.rank not in {None, -1, me}:
        raise UsageError(
            f"{origin.option(request, 'rank')} disagrees with {option}, where this host "
            f"({names[me]}) has place {me}; leave --rank out."
        )
    return me, notes


def reached_at(addresses: Sequence[Address]) -> list[Address]:
    """Return those of our ADDRESSES that other hosts may reach: IPv4, and no loopback."""
    return [at for at in addresses if not is_loopback(at.ip) and ":" not in at.ip]


def own_addresses(facts: Facts) -> str:
    """List our addresses with their interfaces, without loopback and IPv6."""
    reached = reached_at(facts.addresses)
    addresses = [f"{address.ip} ({address.interface})" for address in reached]
    return ", ".join(addresses) or "no address but loopback"
