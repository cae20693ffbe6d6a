"""Names, interfaces and RDMA ports of this host, for a check-up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import psutil

from fleetrun.doctor.facts import Interface, NameLookup, Network, RdmaPort
from fleetrun.probe import addresses, tcp
from fleetrun.run.isolation import IsolatedCall

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
