"""The addresses of this host, and the way to the others."""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import os
from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.plan import hosts, origin
from fleetrun.probe import files, netlink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.model import Address, Facts, Request


# The kernel's words for a link over which nothing goes (RFC 2863, ifOperStatus).
_NO_LINK = ("down", "lowerlayerdown", "notpresent")

# Bridges to the containers and virtual machines of this host, and the ends of their cables.
_INTERNAL = ("br-", "cali", "cni", "docker", "lxcbr", "lxdbr", "podman", "tap", "veth", "virbr")

# An address of IPv6 that is known only on its own link.
_LINK_LOCAL = "fe80:"

# Nobody's (RFC 5737): the way there is the way to anybody.
_ELSEWHERE = "192.0.2.1"


def with_network(facts: Facts, names: Sequence[str], request: Request, root: str = "/") -> Facts:
    """Complete FACTS with our addresses, what the hosts' NAMES are, and the way to the peers.

    Raises EnvironmentFault when this host has no address in the network that REQUEST names.
    """
    own = addresses()
    facts = facts._replace(addresses=own, dead_ends=dead_ends(own, root))
    if request.network is not None:
        facts = facts._replace(
            network=chosen(request.network, own, origin.option(request, "network"))
        )
    if facts.hostname in names:
        # The name says it: only the first peer is looked up, for the way there.
        peers = [name for name in names if name != facts.hostname][:1]
    else:
        peers = [name for name in names if not hosts.is_own(name, facts)]
    resolved = {name: resolve(name) for name in peers if not hosts.is_address(name)}
    facts = facts._replace(resolved=resolved)
    for name in peers:
        if not hosts.is_own(name, facts):
            targets = resolved.get(name, (name,))
            return facts._replace(peer_interface=_interface_to(targets, facts.addresses))
    return facts


def chosen(network: str, own: Sequence[Address], option: str) -> Address:
    """Return the one of OWN addresses that is in NETWORK, an interface or addresses as a CIDR.

    It is one of IPv4, as Paddle cannot read others. OPTION is how NETWORK was given. Raises
    UsageError where it is neither, EnvironmentFault where we have no such address.
    """
    named = [one for one in own if one.interface == network]
    if not named and any(letter in network for letter in "./:"):
        named = _within(network, own, option)
    named = [one for one in named if not one.ip.startswith(_LINK_LOCAL)]
    if not named:
        shown = ", ".join(f"{one.interface} ({one.ip})" for one in own)
        raise EnvironmentFault(
            f"{option}: this host has no address there, only {shown}; name an interface, or its "
            "network as 10.0.0.0/16."
        )
    readable = [one for one in named if ":" not in one.ip]
    if not readable:
        raise EnvironmentFault(
            f"{option}: this host has only {named[0].ip} there ({named[0].interface}), and "
            f"{hosts.NO_IPV6}; name a network of IPv4."
        )
    return readable[0]


def own(request: Request, root: str = "/") -> str:
    """Return the address by which other hosts are likely to reach this one.

    Raises EnvironmentFault where there is none, or none in the network that REQUEST names.
    """
    if request.host is not None:
        return request.host
    found = addresses()
    if request.network is not None:
        return chosen(request.network, found, origin.option(request, "network")).ip
    useless = dead_ends(found, root)
    reachable = [
        one
        for one in found
        if ":" not in one.ip and not hosts.is_loopback(one.ip) and one.interface not in useless
    ]
    if not reachable:
        raise EnvironmentFault(
            "This host has no address that other hosts could reach: give one with --host."
        )
    outwards = _interface_to((_ELSEWHERE,), found)
    return next((one.ip for one in reachable if one.interface == outwards), reachable[0].ip)


def _within(network: str, own: Sequence[Address], option: str) -> list[Address]:
    import ipaddress  # only where a network is given by its addresses

    try:
        wanted = ipaddress.ip_network(network, strict=False)
    except ValueError:
        raise UsageError(
            f"{option} is neither an interface nor a network; write eth1, or 10.0.0.0/16."
        ) from None
    return [one for one in own if ipaddress.ip_address(one.ip) in wanted]


def addresses() -> tuple[Address, ...]:
    """Return every IP address of this host; EnvironmentFault where the kernel does not tell."""
    try:
        return netlink.addresses()
    except OSError as error:
        # No library knows another way.
        raise EnvironmentFault(
            f"The addresses of this host cannot be read ({error.strerror}): the sandbox or "
            "container must allow netlink sockets."
        ) from None


def dead_ends(own: Sequence[Address], root: str) -> frozenset[str]:
    """Return the interfaces of OWN addresses that lead to no other host."""
    reachable = {one.interface for one in own if not one.ip.startswith(_LINK_LOCAL)}
    return frozenset(
        name
        for name in {one.interface for one in own}
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
    """Return the IPv4 addresses of a host's name; none when nobody knows it."""
    # As text, Python would import a codec that takes 20 ms.
    asked = name.encode() if name.isascii() else name
    try:
        found = _socket.getaddrinfo(asked, None, _socket.AF_INET, _socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _interface_to(targets: Sequence[str], own: Sequence[Address]) -> str | None:
    """Return the interface from which the kernel would reach the first of TARGETS it can."""
    for target in targets:
        probe = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
        try:
            # Connecting a datagram socket sends nothing; the kernel only looks up the route.
            probe.connect((target, 9))
            source = probe.getsockname()[0]
        except OSError:
            continue
        finally:
            probe.close()
        return next((address.interface for address in own if address.ip == source), None)
    return None


def rdma_ports(root: str) -> list[tuple[str, str, str, str]]:
    """Return each port of the InfiniBand and RoCE devices: device, port, state and rate."""
    folder = os.path.join(root, "sys/class/infiniband")
    found = []
    for device in files.names(folder):
        ports = os.path.join(folder, device, "ports")
        for port in files.names(ports):
            state, rate = (
                files.text(os.path.join(ports, port, name)).strip() for name in ("state", "rate")
            )
            found.append((device, port, state, rate))
    return found


def rdma(root: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the InfiniBand and RoCE devices with an active port, and all of them."""
    names = files.names(os.path.join(root, "sys/class/infiniband"))
    active = dict.fromkeys(name for name, _, state, _ in rdma_ports(root) if "ACTIVE" in state)
    return tuple(active), tuple(names)
