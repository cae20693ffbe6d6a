"""The addresses of this host, and the route to the others."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import ipaddress
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import files
from fleetrun.model import Address, Facts, Request, Roster
from fleetrun.plan import hosts, origin

# The kernel's words for a link that carries nothing (RFC 2863, ifOperStatus).
_NO_LINK = ("down", "lowerlayerdown", "notpresent")

# Bridges to this host's containers and virtual machines, and the ends of their cables.
_INTERNAL = ("br-", "cali", "cni", "docker", "lxcbr", "lxdbr", "podman", "tap", "veth", "virbr")

_LOOPBACK = "lo"

# IPv6 addresses that are valid only on their own link.
_LINK_LOCAL = "fe80:"

# A documentation address (RFC 5737): its route is the default route.
_ELSEWHERE = "192.0.2.1"


def with_network(facts: Facts, names: Sequence[str], request: Request, root: str = "/") -> Facts:
    """Complete FACTS with our addresses, those of the hosts NAMES, and the route to the peers.

    Raises EnvironmentFault if this host has no address in the network that REQUEST names.
    """
    own_addresses = addresses()
    facts = facts._replace(addresses=own_addresses, dead_ends=dead_ends(own_addresses, root))
    if request.network is not None:
        facts = facts._replace(
            network=chosen(request.network, own_addresses, origin.option(request, "network"))
        )
    if facts.hostname in names:
        # Our own name is listed, so only the first peer is looked up, for the route.
        peers = [name for name in names if name != facts.hostname][:1]
    else:
        peers = [name for name in names if not hosts.is_own(name, facts)]
    resolved = {name: resolve(name) for name in peers if not hosts.is_address(name)}
    facts = facts._replace(resolved=resolved)
    _check_readable(request, resolved)
    for name in peers:
        if not hosts.is_own(name, facts):
            targets = resolved.get(name, (name,))
            return facts._replace(peer_interface=interface_to(targets, facts.addresses))
    return facts


def _check_readable(request: Request, resolved: Mapping[str, Sequence[str]]) -> None:
    """Raise UsageError if ranks would get a name that RESOLVED has only IPv6 addresses for."""
    point = hosts.meets_at(request)
    for name, ips in resolved.items():
        if not ips or ":" not in ips[0]:
            continue
        if point is None or name != point.host or name == request.host:
            option = f"{origin.option(request, 'host')}: " if name == request.host else ""
            raise UsageError(
                f"{option}{name} is {ips[0]} alone, and {hosts.NO_IPV6}: give the IPv4 address."
            )
        is_store = hosts.store_endpoints(request.master or "") is not None
        if request.network is None and request.host is None and not is_store:
            option = origin.option(request, "master")
            raise UsageError(f"{option}: {name} is {ips[0]}; {hosts.NO_IPV6_MASTER}")


def with_members(facts: Facts, roster: Roster) -> Facts:
    """Complete FACTS with the route to the other hosts of ROSTER, if it was not known before."""
    if facts.peer_interface is not None or not facts.addresses:
        return facts
    others = [member.host for place, member in enumerate(roster.members) if place != roster.me]
    names = [name for name in others if not hosts.is_own(name, facts)][:1]
    targets = [target for name in names for target in facts.resolved.get(name) or resolve(name)]
    return facts._replace(peer_interface=interface_to(targets, facts.addresses))


def chosen(network: str, own_addresses: Sequence[Address], option: str) -> Address:
    """Return the first of OWN_ADDRESSES in NETWORK, an interface or a CIDR range.

    Only IPv4, as Paddle cannot parse IPv6. OPTION is the option that gave NETWORK, for messages.
    Raises UsageError if NETWORK is neither, EnvironmentFault if we have no such address.
    """
    candidates = [address for address in own_addresses if address.interface == network]
    if not candidates and any(letter in network for letter in "./:"):
        candidates = _within(network, own_addresses, option)
    candidates = [address for address in candidates if not address.ip.startswith(_LINK_LOCAL)]
    if not candidates:
        shown = ", ".join(f"{address.interface} ({address.ip})" for address in own_addresses)
        raise EnvironmentFault(
            f"{option}: this host has no address there, only {shown}; name an interface, or its "
            "network as 10.0.0.0/16."
        )
    readable = [address for address in candidates if ":" not in address.ip]
    if not readable:
        raise EnvironmentFault(
            f"{option}: this host has only {candidates[0].ip} there ({candidates[0].interface}), "
            f"and {hosts.NO_IPV6}; name a network of IPv4."
        )
    return readable[0]


def own(request: Request) -> str:
    """Return the address at which other hosts can probably reach this one.

    Raises EnvironmentFault if there is none, or none in the network that REQUEST names.
    """
    if request.host is not None:
        return request.host
    own_addresses = addresses()
    if request.network is not None:
        return chosen(request.network, own_addresses, origin.option(request, "network")).ip
    useless = dead_ends(own_addresses, "/")
    reachable = [
        address
        for address in own_addresses
        if ":" not in address.ip
        and not hosts.is_loopback(address.ip)
        and address.interface not in useless
    ]
    if not reachable:
        raise EnvironmentFault(
            "This host has no address that other hosts could reach: give one with --host."
        )
    outwards = _source_to(_ELSEWHERE)
    return next((address.ip for address in reachable if address.ip == outwards), reachable[0].ip)


def _within(network: str, own_addresses: Sequence[Address], option: str) -> list[Address]:
    try:
        subnet = ipaddress.ip_network(network, strict=False)
    except ValueError:
        raise UsageError(
            f"{option} is neither an interface nor a network; write eth1, or 10.0.0.0/16."
        ) from None
    return [address for address in own_addresses if ipaddress.ip_address(address.ip) in subnet]


def addresses() -> tuple[Address, ...]:
    """Return every IP address of this host, with the interface that has it, IPv4 first.

    Raises EnvironmentFault if the kernel refuses.
    """
    # It takes 25 ms to import, and a launch on one host needs no addresses.
    import psutil

    try:
        listed = psutil.net_if_addrs()
    except OSError as error:
        # Only netlink has them.
        raise EnvironmentFault(
            f"The addresses of this host cannot be read ({error.strerror}): the sandbox or "
            "container must allow netlink sockets."
        ) from None
    return tuple(
        # The label of an address, `eth0:1`, is no interface.
        Address(name.partition(":")[0], entry.address.partition("%")[0])
        for family in (_socket.AF_INET, _socket.AF_INET6)
        for name, entries in listed.items()
        for entry in entries
        if entry.family == family
    )


def dead_ends(own_addresses: Sequence[Address], root: str) -> frozenset[str]:
    """Return the interfaces of OWN_ADDRESSES that lead to no other host."""
    reachable = {
        address.interface for address in own_addresses if not address.ip.startswith(_LINK_LOCAL)
    }
    return frozenset(
        name
        for name in {address.interface for address in own_addresses}
        if name not in reachable or name.startswith(_INTERNAL) or _is_cut_off(name, root)
    )


def _is_cut_off(name: str, root: str) -> bool:
    """Whether the interface NAME has no link, or is a bridge to which nothing is attached."""
    folder = os.path.join(root, "sys/class/net", name)
    if files.text(os.path.join(folder, "operstate")).strip() in _NO_LINK:
        return True
    ports = os.path.join(folder, "brif")
    return os.path.isdir(ports) and not files.names(ports)


def resolve(name: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of a host, else those of IPv6; none if the name is unknown."""
    # For text, Python would import a codec, which takes 20 ms.
    query = name.encode() if name.isascii() else name
    for family in (_socket.AF_INET, _socket.AF_INET6):
        with suppress(OSError):
            entries = _socket.getaddrinfo(query, None, family, _socket.SOCK_STREAM)
            return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))
    return ()


def interface_to(targets: Sequence[str], own_addresses: Sequence[Address]) -> str | None:
    """Return the interface of the route to the first reachable one of TARGETS; never `lo`."""
    for target in targets:
        source = _source_to(target)
        if source is None or hosts.is_loopback(source):
            continue
        interface = next((own.interface for own in own_addresses if own.ip == source), None)
        # A routing daemon may announce an address on `lo`; packets leave by another interface.
        return None if interface == _LOOPBACK else interface
    return None


def _source_to(target: str) -> str | None:
    """Return the address from which the kernel would send to TARGET; None if there is no route."""
    with closing(_socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)) as probe:
        try:
            # Connecting a datagram socket sends nothing; the kernel only looks up the route.
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def rdma_ports(root: str) -> list[tuple[str, str, str, str]]:
    """Return each port of the InfiniBand and RoCE devices: device, port, state and rate."""
    folder = os.path.join(root, "sys/class/infiniband")
    rows = []
    for device in files.names(folder):
        ports = os.path.join(folder, device, "ports")
        for port in files.names(ports):
            state, rate = (
                files.text(os.path.join(ports, port, name)).strip() for name in ("state", "rate")
            )
            rows.append((device, port, state, rate))
    return rows


def rdma(root: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the InfiniBand and RoCE devices with an active port, and all of them."""
    names = files.names(os.path.join(root, "sys/class/infiniband"))
    active = dict.fromkeys(name for name, _, state, _ in rdma_ports(root) if "ACTIVE" in state)
    return tuple(active), tuple(names)
