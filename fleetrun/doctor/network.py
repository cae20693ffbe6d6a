"""Checks of host names, the interface between ranks, RDMA ports and the job's ports."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import psutil

from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.engines.ports import Ports
from fleetrun.errors import EnvironmentFault
from fleetrun.host import addresses, tcp
from fleetrun.plan import communication, hosts
from fleetrun.run.isolation import IsolatedCall
from fleetrun.text import format_ranges

# A resolver tries its next server after 5 s; anything slower delays every rank.
TIMEOUT_S = 6.0
_SLOW_LOOKUP_S = 1.0
# Bridges and tunnels of containers and virtual machines.
_INSIDE = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|lxc|podman|tun|tap|wg|tailscale")
_FAST_ENOUGH_MBIT = 10_000


def host_names(
    job: CheckedJob,
    resolve: Callable[[str], tuple[str, ...]] = addresses.resolve,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Finding]:
    """Look up our own name and those of the other hosts."""
    own = os.uname().nodename
    others = [member.host for member in job.members if not hosts.is_address(member.host)]
    names = tuple(dict.fromkeys((own, *(others if job.has_peers else ()))))

    def look(name: str) -> object:
        began = time.monotonic()
        return resolve(name), time.monotonic() - began

    # Each in its own process: a resolver may hang.
    for name, call in [(name, IsolatedCall(partial(look, name))) for name in names]:
        answer = call.result(timeout_s)
        nothing = (), timeout_s if answer.is_late else 0.0
        ips, seconds = cast("tuple[tuple[str, ...], float]", answer.value or nothing)
        if seconds >= _SLOW_LOOKUP_S:
            yield warning(
                "host name",
                f"resolving {name} takes {seconds:.1f} s{'' if ips else ' or longer'}",
                "every rank waits that long for each host",
                "cat /etc/resolv.conf  # a server there does not answer; or use addresses in --ips",
            )
        elif ips:
            yield ok("own name" if name == own else "host name", f"{name} is {', '.join(ips)}")
        elif name == own:
            yield warning(
                "own name",
                f"this host is called {name}, which does not resolve",
                "programs that look up this host's name fail or wait",
                f"echo '<address> {name}' >> /etc/hosts  # or ask who runs DNS",
            )
        else:
            seen, means = f"{name} cannot be resolved", "no rank here reaches that host"
            fix = f"getent hosts {name}  # /etc/hosts, DNS, or its address in --ips"
            yield error("host name", seen, means, fix)


class Interface(NamedTuple):
    """A network interface that is up; its speed in Mbit/s, 0 if unknown."""

    name: str
    addresses: tuple[str, ...]
    speed_mbit: int
    mtu: int


def interfaces() -> list[Interface]:
    """Return the interfaces of this host that are up, in the kernel's order."""
    ips: dict[str, list[str]] = {}
    for address in addresses.addresses():
        ips.setdefault(address.interface, []).append(address.ip)
    return [
        # 65535 stands for unknown, too.
        Interface(name, tuple(ips.get(name, ())), stat.speed % 65535, stat.mtu)
        for name, stat in psutil.net_if_stats().items()
        if stat.isup
    ]


def interface(job: CheckedJob, here: Sequence[Interface] | None = None) -> Iterator[Finding]:
    """Check the interface by which ranks of several hosts reach each other."""
    if job.roster is None or not job.has_peers:
        return
    if hosts.is_loopback(job.members[job.roster.me].host):
        return
    check, user = "interface", "NCCL" if job.is_nccl else "gloo"
    variable = communication.NCCL if job.is_nccl else communication.GLOO
    option = "--nccl SOCKET_IFNAME" if job.is_nccl else f"--env {variable}"
    known = {up.name: up for up in (interfaces() if here is None else here) if up.addresses}
    named = job.variables.get(variable, "")
    # fleetrun sets the variable to the interface on the route to the other hosts.
    names = [named or (None if job.facts is None else job.facts.peer_interface)]
    if named and job.is_nccl:
        names = list(communication.nccls(named, tuple(known)))
    interface = next((known[name] for name in names if name in known), None)
    listed = ", ".join(known)
    if interface is None and named:
        seen = f"{variable}={named} names none that is up ({listed})"
        means = f"{user} finds no way to the other ranks and ends the job"
        yield error(check, seen, means, f"unset {variable}  # or {option}= one of those")
        return
    if interface is None:
        means = "ranks cannot reach each other"
        yield error(check, "none is up that leads to the other hosts", means, "ip address")
        return
    speed = f", {interface.speed_mbit / 1000:g} Gbit/s" if interface.speed_mbit else ""
    seen = f"{interface.name} ({', '.join(interface.addresses)}{speed}, MTU {interface.mtu})"
    seen = f"{user} takes {seen}" if named else f"the route to the other hosts is {seen}"
    fix = f"{option}=...  # there are {listed}"
    if interface.name == "lo" or _INSIDE.match(interface.name):
        means = "other hosts are not on that network, or reach it by detours"
        yield warning(check, seen, means, fix)
    elif interface.name.startswith("wl"):
        yield warning(check, seen, "Wi-Fi is slow and loses packets", fix)
    elif 0 < interface.speed_mbit < _FAST_ENOUGH_MBIT and not addresses.rdma_ports("/"):
        means = "gradients of hundreds of megabytes take seconds to cross it, in each step"
        fix = f"ethtool {interface.name}  # is there a faster one?"
        yield warning(check, seen, means, fix)
    else:
        yield ok(check, seen)


def rdma(job: CheckedJob, root: str = "/") -> Iterator[Finding]:
    """Check each port of the InfiniBand and RoCE devices."""
    for device, port, state, rate in addresses.rdma_ports(root):
        name = f"{device} port {port}"
        if "ACTIVE" in state:
            yield ok("InfiniBand", f"{name} is active, {rate or 'rate unknown'}")
            continue
        user, option = ("NCCL", "; --nccl IB_HCA=...") if job.is_nccl else ("traffic", "")
        yield warning(
            "InfiniBand",
            f"{name} is in the state {state or 'unknown'}",
            f"{user} takes another, slower path, or waits for it",
            f"ibstat {device}  # cable, switch, subnet manager{option}",
        )


def ports(job: CheckedJob, root: str = "/") -> Iterator[Finding]:
    """Check that the job's ports can be used, if it is known which they are."""
    if job.roster is None or not (job.has_peers or job.request.start_port is not None):
        return
    me, is_held = job.members[job.roster.me], False
    address = me.host if job.has_peers and hosts.is_loopback(me.host) else None
    for port in me.ports:
        reserved = Ports(os.getpid())
        try:
            reserved.take((port,), address)
        except EnvironmentFault:
            is_held = True
            yield error(
                "port",
                f"{port} is taken by {tcp.holder(port) or tcp.STRANGER}",
                "the rank that is to listen there cannot",
                "stop that process, or give another --start_port, the same on every host",
            )
        finally:
            reserved.close()
    low, high = tcp.ephemeral(root)
    exposed = [port for port in sorted(me.ports) if low <= port <= high]
    if job.has_peers and exposed:
        yield warning(
            "port",
            f"{exposed[0]} is in the kernel's range for outgoing connections ({low}-{high})",
            "another program may hold it when the job starts",
            f"--start_port=6070  # or another number below {low}, the same on every host",
        )
    elif me.ports and not is_held:
        yield ok("port", f"{format_ranges(me.ports)} can be used")
