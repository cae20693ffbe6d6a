"""Checks of names, interfaces, RDMA ports and the job's ports; each reads and judges."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import psutil

from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.host import addresses, tcp
from fleetrun.plan import communication
from fleetrun.run.isolation import IsolatedCall
from fleetrun.text import format_ranges

# A resolver tries its next server after 5 s; anything slower delays every rank.
TIMEOUT_S = 6.0
_SLOW_LOOKUP_S = 1.0
# Bridges and tunnels of containers and virtual machines, and wireless interfaces.
_INSIDE = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|lxc|podman|tun|tap|wg|tailscale")
_RADIO = re.compile(r"wl")
_FAST_ENOUGH_MBIT = 10_000


def host_names(
    names: Sequence[str],
    resolve: Callable[[str], tuple[str, ...]] = addresses.resolve,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Finding]:
    """Look up NAMES, our own first, each in its own process: a resolver may hang."""

    def look(name: str) -> object:
        began = time.monotonic()
        return resolve(name), time.monotonic() - began

    questions = [(name, IsolatedCall(partial(look, name))) for name in names]
    for name, question in questions:
        answer = question.result(timeout_s)
        nothing = (), timeout_s if answer.is_late else 0.0
        ips, seconds = cast("tuple[tuple[str, ...], float]", answer.value or nothing)
        yield _name(name, ips, seconds, is_own=name == names[0])


def _name(name: str, ips: Sequence[str], seconds: float, *, is_own: bool) -> Finding:
    """Judge the addresses IPS of the host NAME, which were found in SECONDS."""
    check = "own name" if is_own else "host name"
    if seconds >= _SLOW_LOOKUP_S:
        return warning(
            "host name",
            f"resolving {name} takes {seconds:.1f} s{'' if ips else ' or longer'}",
            "every rank waits that long for each host",
            "cat /etc/resolv.conf  # a server there does not answer; or use addresses in --ips",
        )
    if ips:
        return ok(check, f"{name} is {', '.join(ips)}")
    if is_own:
        return warning(
            check,
            f"this host is called {name}, which does not resolve",
            "programs that look up this host's name fail or wait",
            f"echo '<address> {name}' >> /etc/hosts  # or ask who runs DNS",
        )
    return error(
        check,
        f"{name} cannot be resolved",
        "no rank here reaches that host",
        f"getent hosts {name}  # /etc/hosts, DNS, or its address in --ips",
    )


class Interface(NamedTuple):
    """A network interface; its speed in Mbit/s, None if unknown."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    speed_mbit: int | None
    mtu: int
    is_loopback: bool = False


def interfaces() -> list[Interface]:
    """Return the interfaces of this host, in the kernel's order."""
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
        for name, stat in psutil.net_if_stats().items()
    ]


def taken(
    here: Sequence[Interface], peer_interface: str | None, env: Mapping[str, str], *, is_nccl: bool
) -> Interface | None:
    """Return the interface of HERE that ranks with the variables ENV use; None if there is none.

    NCCL's order: its variable, names that begin with ib, others, docker's, loopback. With several
    hosts, fleetrun sets the variable to PEER_INTERFACE, on the route to them.
    """
    up = [interface for interface in here if interface.is_up and interface.addresses]
    asked = env.get(communication.variable(is_nccl=is_nccl), "")
    names = [interface.name for interface in up]
    if asked:
        names = list(communication.nccls(asked, names) if is_nccl else {asked}.intersection(names))
    elif peer_interface is not None:
        names = [peer_interface]
    else:

        def order(name: str) -> int:
            return 0 if name.startswith("ib") else 2 if name.startswith("docker") else 1

        loopback = [interface.name for interface in up if interface.is_loopback]
        names.sort(key=lambda name: 3 if name in loopback else order(name))
    known = {interface.name: interface for interface in up}
    return next((known[name] for name in names if name in known), None)


def interface(
    here: Sequence[Interface],
    peer_interface: str | None,
    env: Mapping[str, str],
    *,
    has_peers: bool,
    has_rdma: bool,
    is_nccl: bool,
) -> Finding:
    """Check the interface by which ranks reach each other: that of NCCL, or of gloo."""
    check, user = "interface", "NCCL" if is_nccl else "gloo"
    variable = communication.variable(is_nccl=is_nccl)
    option = "--nccl SOCKET_IFNAME" if is_nccl else f"--env {variable}"
    interface = taken(here, peer_interface, env, is_nccl=is_nccl)
    listed = ", ".join(up.name for up in here if up.is_up)
    if interface is None and env.get(variable):
        return error(
            check,
            f"{variable}={env[variable]} names none that is up ({listed})",
            f"{user} finds no way to the other ranks and ends the job",
            f"unset {variable}  # or {option}= one of those",
        )
    if interface is None:
        means = "ranks cannot reach each other"
        return error(check, "none is up with an address", means, "ip address")
    speed = f", {interface.speed_mbit / 1000:g} Gbit/s" if interface.speed_mbit else ""
    seen = f"{interface.name} ({', '.join(interface.addresses)}{speed}, MTU {interface.mtu})"
    fix = f"ip route  # there are {listed}"
    if is_nccl or env.get(variable):
        seen, fix = f"{user} takes {seen}", f"{option}=...  # there are {listed}"
    elif has_peers:
        seen = f"the route to the other hosts is {seen}"
    if not has_peers:
        return ok(check, seen)
    means = ""
    if interface.is_loopback or _INSIDE.match(interface.name):
        means = "other hosts are not on that network, or reach it by detours"
    elif _RADIO.match(interface.name):
        means = "Wi-Fi is slow and loses packets"
    if means:
        return warning(check, seen, means, fix)
    is_slow = interface.speed_mbit is not None and interface.speed_mbit < _FAST_ENOUGH_MBIT
    if is_slow and not has_rdma:
        means = "gradients of hundreds of megabytes take seconds to cross it, in each step"
        return warning(check, seen, means, f"ethtool {interface.name}  # is there a faster one?")
    return ok(check, seen)


def rdma(root: str = "/", *, is_nccl: bool) -> Iterator[Finding]:
    """Check each port of the InfiniBand and RoCE devices."""
    for device, port, state, rate in addresses.rdma_ports(root):
        name = f"{device} port {port}"
        if "ACTIVE" in state:
            yield ok("InfiniBand", f"{name} is active, {rate or 'rate unknown'}")
        else:
            yield warning(
                "InfiniBand",
                f"{name} is in the state {state or 'unknown'}",
                f"{'NCCL' if is_nccl else 'traffic'} takes another, slower path, or waits for it",
                f"ibstat {device}  # cable, switch, subnet manager"
                + ("; --nccl IB_HCA=..." if is_nccl else ""),
            )


def ports(
    wanted: Sequence[tuple[int, str]], *, has_peers: bool, root: str = "/"
) -> Iterator[Finding]:
    """Check the WANTED ports of the job here, each with who holds it; empty: nobody."""
    held = [(port, holder) for port, holder in wanted if holder]
    for port, holder in held:
        yield error(
            "port",
            f"{port} is taken by {holder}",
            "the rank that is to listen there cannot",
            "stop that process, or give another --start_port, the same on every host",
        )
    numbers = sorted(port for port, _ in wanted)
    low, high = tcp.ephemeral(root)
    exposed = [port for port in numbers if low <= port <= high]
    if has_peers and exposed:
        yield warning(
            "port",
            f"{exposed[0]} is in the kernel's range for outgoing connections ({low}-{high})",
            "another program may hold it when the job starts",
            f"--start_port=6070  # or another number below {low}, the same on every host",
        )
    elif numbers and not held:
        yield ok("port", f"{format_ranges(numbers)} can be used")
