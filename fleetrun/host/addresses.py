"""The addresses of this host, and the route to the others."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import closing, suppress

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import files
from fleetrun.model import Address, Facts, Request, Roster
from fleetrun.plan import hosts, origin

# The kernel's words for a link that carries nothing (RFC 2863, ifOperStatus).
_NO_LINK = ("down", "lowerlayerdown", "notpresent")

# Bridges to this host's containers and virtual machines, and the ends of their cables.
_INTERNAL = ("br-", "cali", "cni", "docker", "lxcbr", "lxdbr", "podman", "tap", "veth", "virbr")

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
        option = origin.option(request, "network")
        facts = facts._replace(network=chosen(request.network, own_addresses, option))
    peers = [name for name in names if not hosts.is_own(name, facts)]
    if facts.hostname in names:
        # Our own name is listed, so only the first peer is looked up, for the route.
        peers = peers[:1]
    resolved = {name: resolve(name) for name in peers if not hosts.is_address(name)}
    facts = facts._replace(resolved=resolved)
    for name, ips in resolved.items():
        if ips and ":" in ips[0]:
            raise UsageError(
                f"{name} is {ips[0]} alone, and {hosts.NO_IPV6}: give an IPv4 address."
            )
    for name in peers:
        if not hosts.is_own(name, facts):
            targets = resolved.get(name, (name,))
            return facts._replace(peer_interface=interface_to(targets, facts.addresses))
    return facts


def with_members(facts: Facts, roster: Roster) -> Facts:
    """Complete FACTS with the route to the other hosts of ROSTER, if it was not known before."""
    if facts.peer_interface is not None or not facts.addresses:
        return facts
    others = [member.host for place, member in enumerate(roster.members) if place != roster.me]
    names = [name for name in others if not hosts.is_own(name, facts)][:1]
    targets = [target for name in names for target in facts.resolved.get(name) or resolve(name)]
    return facts._replace(peer_interface=interface_to(targets, facts.addresses))


def chosen(network: str, own_addresses: Sequence[Address], option: str) -> Address:
    """Return the first IPv4 address of OWN_ADDRESSES in NETWORK, an interface or a CIDR range.

    OPTION is the option that gave NETWORK. Raises UsageError if NETWORK is neither,
    EnvironmentFault if we have no such address.
    """
    candidates = [address for address in own_addresses if address.interface == network]
    if not candidates and any(letter in network for letter in "./:"):
        try:
            subnet = ipaddress.ip_network(network, strict=False)
        except ValueError:
            raise UsageError(
                f"{option} is neither an interface nor a network; write eth1, or 10.0.0.0/16."
            ) from None
        candidates = [own for own in own_addresses if ipaddress.ip_address(own.ip) in subnet]
    readable = [address for address in candidates if ":" not in address.ip]
    if not readable:
        shown = ", ".join(f"{address.interface} ({address.ip})" for address in own_addresses)
        raise EnvironmentFault(
            f"{option}: this host has no IPv4 address there, only {shown}; name an interface, or "
            "its network as 10.0.0.0/16."
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
        address.ip
        for address in hosts.reached_at(own_addresses)
        if address.interface not in useless
    ]
    if not reachable:
        raise EnvironmentFault(
            "This host has no address that other hosts could reach: give one with --host."
        )
    outwards = _source_to(_ELSEWHERE)
    return outwards if outwards in reachable else reachable[0]


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
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, entries in listed.items()
        for entry in entries
        if entry.family == family
    )


def dead_ends(own_addresses: Sequence[Address], root: str) -> frozenset[str]:
    """Return the interfaces of OWN_ADDRESSES that lead to no other host."""
    reachable = {own.interface for own in own_addresses if not own.ip.startswith(_LINK_LOCAL)}
    return frozenset(
        name
        for name in {own.interface for own in own_addresses}
        if name not in reachable or name.startswith(_INTERNAL) or _is_cut_off(name, root)
    )


def _is_cut_off(name: str, root: str) -> bool:
    """Whether the interface NAME has no link, or is a bridge to which nothing is attached."""
    folder = os.path.join(root, "sys/class/net", name)
    ports = os.path.join(folder, "brif")
    has_no_link = files.text(os.path.join(folder, "operstate")).strip() in _NO_LINK
    return has_no_link or (os.path.isdir(ports) and not files.names(ports))


def resolve(name: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of a host, else those of IPv6; none if the name is unknown."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, UnicodeError):
            entries = socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
            return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))
    return ()


def interface_to(targets: Sequence[str], own_addresses: Sequence[Address]) -> str | None:
    """Return the interface of the route to the first reachable one of TARGETS; never `lo`."""
    sources = (_source_to(target) for target in targets)
    source = next((ip for ip in sources if ip is not None and not hosts.is_loopback(ip)), None)
    interface = next((own.interface for own in own_addresses if own.ip == source), None)
    # A routing daemon may announce an address on `lo`; packets leave by another interface.
    return None if interface == "lo" else interface


def _source_to(target: str) -> str | None:
    """Return the address from which the kernel would send to TARGET; None if there is no route."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            # Connecting a datagram socket sends nothing; the kernel only looks up the route.
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def rdma(root: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the InfiniBand and RoCE devices with an active port, and all of them."""
    folder = os.path.join(root, "sys/class/infiniband")
    names = files.names(folder)

    def is_active(name: str) -> bool:
        ports = os.path.join(folder, name, "ports")
        return any("ACTIVE" in files.text(f"{ports}/{port}/state") for port in files.names(ports))

    return tuple(filter(is_active, names)), names
