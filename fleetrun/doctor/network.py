"""Checks of host names, the interface between ranks and the job's ports."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.engines.ports import Ports
from fleetrun.errors import EnvironmentFault
from fleetrun.host import addresses, tcp
from fleetrun.plan import communication, hosts
from fleetrun.run.isolation import IsolatedCall
from fleetrun.text import format_ranges

# A resolver tries its next server after 5 s; anything slower delays every rank.
_TIMEOUT_S = 6.0
# Bridges and tunnels of containers and virtual machines.
_INSIDE = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|lxc|podman|tun|tap|wg|tailscale")


def host_names(
    job: CheckedJob, resolve: Callable[[str], tuple[str, ...]] = addresses.resolve
) -> Iterator[Finding]:
    """Look up our own name and those of the other hosts, each in a process: one may hang."""
    own = os.uname().nodename
    others = [member.host for member in job.members if not hosts.is_address(member.host)]
    names = tuple(dict.fromkeys((own, *(others if job.has_peers else ()))))
    for name, call in [(name, IsolatedCall(partial(resolve, name))) for name in names]:
        ips = cast("tuple[str, ...]", call.result(_TIMEOUT_S).value or ())
        if ips:
            yield ok("own name" if name == own else "host name", f"{name} is {', '.join(ips)}")
        elif name == own:
            yield warning(
                "own name",
                f"this host is called {name}, which does not resolve within {_TIMEOUT_S:g} s",
                "programs that look up this host's name fail or wait",
                f"echo '<address> {name}' >> /etc/hosts  # or ask who runs DNS",
            )
        else:
            seen = f"{name} cannot be resolved within {_TIMEOUT_S:g} s"
            fix = f"getent hosts {name}  # /etc/hosts, DNS, or its address in --ips"
            yield error("host name", seen, "no rank here reaches that host", fix)


def interface(job: CheckedJob, here: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Check the interface by which ranks of several hosts reach each other.

    HERE has an address of each interface that is up.
    """
    if job.roster is None or not job.has_peers:
        return
    if hosts.is_loopback(job.members[job.roster.me].host):
        return
    if here is None:
        here = {address.interface: address.ip for address in reversed(addresses.addresses())}
    variable = communication.NCCL if job.is_nccl else communication.GLOO
    named = job.variables.get(variable, "")
    # fleetrun sets the variable to the interface on the route to the other hosts.
    names = [named or (None if job.facts is None else job.facts.peer_interface)]
    if named and job.is_nccl:
        names = list(communication.nccls(named, tuple(here)))
    name = next((name for name in names if name in here), None)
    fix = f"unset {variable}  # or --env {variable}= one of {', '.join(here)}"
    if name is None:
        seen = f"{variable}={named} names none" if named else "none leads to the other hosts"
        yield error("interface", seen, "ranks cannot reach each other", fix)
    elif name == "lo" or _INSIDE.match(name):
        means = "other hosts are not on that network, or reach it by detours"
        yield warning("interface", f"ranks use {name} ({here[name]})", means, fix)
    else:
        yield ok("interface", f"ranks use {name} ({here[name]})")


def ports(job: CheckedJob) -> Iterator[Finding]:
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
    if me.ports and not is_held:
        yield ok("port", f"{format_ranges(me.ports)} can be used")
