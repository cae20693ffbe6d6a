"""Checks of names, interfaces, RDMA ports and the job's ports of this host."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import psutil

from fleetrun import conversion
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.host import addresses, tcp
from fleetrun.plan import communication
from fleetrun.run.isolation import IsolatedCall


class Interface(NamedTuple):
    """A network interface; its speed in Mbit/s, None if unknown."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    speed_mbit: int | None
    mtu: int
    is_loopback: bool = False


class RdmaPort(NamedTuple):
    """A port of an InfiniBand or RoCE device: its state and rate in the kernel's words."""

    device: str
    port: str
    state: str
    rate: str


class NameLookup(NamedTuple):
    """The addresses of a host name, and how long resolving it took."""

    name: str
    addresses: tuple[str, ...]
    seconds: float


class Network(NamedTuple):
    """How this host reaches others."""

    hostname: str
    interfaces: tuple[Interface, ...]
    # Our own name first.
    lookups: tuple[NameLookup, ...]
    rdma: tuple[RdmaPort, ...]
    # The value of NCCL_SOCKET_IFNAME, and the interface of the route to the other hosts.
    asked_interface: str
    peer_interface: str | None
    # The ports that the job wants here, and who holds each; empty: nobody.
    ports: tuple[tuple[int, str], ...]
    ephemeral: tuple[int, int]
    has_peers: bool


# A resolver tries its next server after 5 s; anything slower delays every rank.
TIMEOUT_S = 6.0


def read(
    environ: Mapping[str, str],
    *,
    names: Sequence[str] = (),
    peer_interface: str | None = None,
    ports: Sequence[tuple[int, str]] = (),
    root: str = "/",
    resolve: Callable[[str], tuple[str, ...]] = addresses.resolve,
) -> Network:
    """Return how this host reaches the hosts NAMES; PORTS are the job's, with their holders."""
    hostname = os.uname().nodename
    hostnames = list(dict.fromkeys((hostname, *names)))
    return Network(
        hostname=hostname,
        interfaces=tuple(_interfaces()),
        lookups=tuple(lookups(hostnames, resolve)),
        rdma=tuple(RdmaPort(*row) for row in addresses.rdma_ports(root)),
        asked_interface=environ.get("NCCL_SOCKET_IFNAME", ""),
        peer_interface=peer_interface,
        ports=tuple(ports),
        ephemeral=tcp.ephemeral(root),
        has_peers=len(names) > 1,
    )


def _interfaces() -> list[Interface]:
    """Return the interfaces of this host, in the kernel's order."""
    stats = psutil.net_if_stats()
    ips: dict[str, list[str]] = {}
    for address in addresses.addresses():
        ips.setdefault(address.interface, []).append(address.ip)
    return [
        Interface(
            name=name,
            addresses=tuple(ips.get(name, ())),
            is_up=stat.isup,
            # 0 and 65535 stand for unknown.
            speed_mbit=stat.speed if 0 < stat.speed < 65535 else None,
            mtu=stat.mtu,
            is_loopback="loopback" in stat.flags,
        )
        for name, stat in stats.items()
    ]


def lookups(
    names: Sequence[str],
    resolve: Callable[[str], tuple[str, ...]],
    timeout_s: float = TIMEOUT_S,
) -> list[NameLookup]:
    """Look NAMES up, each in its own process: a resolver may hang."""

    def ask(name: str) -> Callable[[], object]:
        def look() -> object:
            began = time.monotonic()
            results = resolve(name)
            return results, time.monotonic() - began

        return look

    questions = [(name, IsolatedCall(ask(name))) for name in names]
    results = []
    for name, question in questions:
        answer = question.result(timeout_s)
        if answer.trouble:
            results.append(NameLookup(name, (), timeout_s if answer.is_late else 0.0))
        else:
            addresses, seconds = cast("tuple[tuple[str, ...], float]", answer.value)
            results.append(NameLookup(name, addresses, seconds))
    return results


_SLOW_LOOKUP_S = 1.0
# Bridges and tunnels of containers and virtual machines, and wireless interfaces.
_INSIDE = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|lxc|podman|tun|tap|wg|tailscale")
_RADIO = re.compile(r"wl")
_FAST_ENOUGH_MBIT = 10_000


def judge(network: Network, *, uses_nccl: bool) -> Iterator[Finding]:
    """Yield the findings about NETWORK; which interface gloo and vendors' libraries take varies."""
    if not uses_nccl:
        network = network._replace(asked_interface="")
    yield from _names(network)
    yield _interface(network, uses_nccl=uses_nccl)
    yield from _rdma(network, user="NCCL" if uses_nccl else "traffic")
    yield from _ports(network)


def _names(network: Network) -> Iterator[Finding]:
    own_lookup, *peer_lookups = network.lookups
    fix = f"echo '<address> {own_lookup.name}' >> /etc/hosts  # or ask who runs DNS"
    slow = _slow(own_lookup)
    if slow is not None:
        yield slow
    elif not own_lookup.addresses:
        means = "programs that look up this host's name fail or wait"
        seen = f"this host is called {own_lookup.name}, which does not resolve"
        yield warning("own name", seen, means, fix)
    else:
        yield ok("own name", f"{own_lookup.name} is {', '.join(own_lookup.addresses)}")
    for lookup in peer_lookups:
        slow = _slow(lookup)
        if slow is not None:
            yield slow
        elif not lookup.addresses:
            yield error(
                "host name",
                f"{lookup.name} cannot be resolved",
                "no rank here reaches that host",
                f"getent hosts {lookup.name}  # /etc/hosts, DNS, or its address in --ips",
            )
        else:
            yield ok("host name", f"{lookup.name} is {', '.join(lookup.addresses)}")


def _slow(lookup: NameLookup) -> Finding | None:
    if lookup.seconds < _SLOW_LOOKUP_S:
        return None
    return warning(
        "host name",
        f"resolving {lookup.name} takes {lookup.seconds:.1f} s"
        + ("" if lookup.addresses else " or longer"),
        "every rank waits that long for each host",
        "cat /etc/resolv.conf  # a server there does not answer; or use addresses in --ips",
    )


def nccl_interface(network: Network) -> Interface | None:
    """Return the interface that NCCL uses for its sockets; None if it finds none.

    NCCL's order: NCCL_SOCKET_IFNAME, names that begin with ib, others, docker's, loopback. With
    several hosts, fleetrun sets the variable to the interface on the route to them.
    """
    up = [interface for interface in network.interfaces if interface.is_up and interface.addresses]
    if network.asked_interface:
        allowed = communication.nccls(network.asked_interface, [interface.name for interface in up])
        return next((interface for interface in up if interface.name in allowed), None)
    if network.peer_interface is not None:
        return next(
            (interface for interface in up if interface.name == network.peer_interface), None
        )
    ranked = [
        [interface for interface in up if interface.name.startswith("ib")],
        [
            interface
            for interface in up
            if not interface.is_loopback and not interface.name.startswith("docker")
        ],
        [interface for interface in up if interface.name.startswith("docker")],
        [interface for interface in up if interface.is_loopback],
    ]
    return next((interface for group in ranked for interface in group), None)


def _interface(network: Network, *, uses_nccl: bool) -> Finding:
    check = "interface"
    interface = nccl_interface(network)
    listed = ", ".join(up.name for up in network.interfaces if up.is_up)
    if interface is None and network.asked_interface:
        return error(
            check,
            f"NCCL_SOCKET_IFNAME={network.asked_interface} names none that is up ({listed})",
            "NCCL finds no way to the other ranks and ends the job",
            "unset NCCL_SOCKET_IFNAME  # or --nccl SOCKET_IFNAME= one of those",
        )
    if interface is None:
        means = "ranks cannot reach each other"
        return error(check, "none is up with an address", means, "ip address")
    speed = f", {interface.speed_mbit / 1000:g} Gbit/s" if interface.speed_mbit else ""
    addresses = ", ".join(interface.addresses)
    seen = f"{interface.name} ({addresses}{speed}, MTU {interface.mtu})"
    fix = f"ip route  # there are {listed}"
    if uses_nccl:
        seen, fix = f"NCCL takes {seen}", f"--nccl SOCKET_IFNAME=...  # there are {listed}"
    elif network.has_peers:
        seen = f"the route to the other hosts is {seen}"
    if not network.has_peers:
        return ok(check, seen)
    means = ""
    if interface.is_loopback or _INSIDE.match(interface.name):
        means = "other hosts are not on that network, or reach it by detours"
    elif _RADIO.match(interface.name):
        means = "Wi-Fi is slow and loses packets"
    if means:
        return warning(check, seen, means, fix)
    if (
        interface.speed_mbit is not None
        and interface.speed_mbit < _FAST_ENOUGH_MBIT
        and not network.rdma
    ):
        means = "gradients of hundreds of megabytes take seconds to cross it, in each step"
        return warning(check, seen, means, f"ethtool {interface.name}  # is there a faster one?")
    return ok(check, seen)


def _rdma(network: Network, *, user: str) -> Iterator[Finding]:
    for port in network.rdma:
        name = f"{port.device} port {port.port}"
        if "ACTIVE" in port.state:
            yield ok("InfiniBand", f"{name} is active, {port.rate or 'rate unknown'}")
        else:
            yield warning(
                "InfiniBand",
                f"{name} is in the state {port.state or 'unknown'}",
                f"{user} takes another, slower path, or waits for it",
                f"ibstat {port.device}  # cable, switch, subnet manager"
                + ("; --nccl IB_HCA=..." if user == "NCCL" else ""),
            )


def _ports(network: Network) -> Iterator[Finding]:
    taken = [(port, holder) for port, holder in network.ports if holder]
    for port, holder in taken:
        yield error(
            "port",
            f"{port} is taken by {holder}",
            "the rank that is to listen there cannot",
            "stop that process, or give another --start_port, the same on every host",
        )
    numbers = sorted(port for port, _ in network.ports)
    if not numbers:
        return
    low, high = network.ephemeral
    exposed = [port for port in numbers if low <= port <= high]
    if network.has_peers and exposed:
        yield warning(
            "port",
            f"{exposed[0]} is in the kernel's range for outgoing connections ({low}-{high})",
            "another program may hold it when the job starts",
            f"--start_port=6070  # or another number below {low}, the same on every host",
        )
    elif not taken:
        yield ok("port", f"{conversion.ranges(numbers)} can be used")
