"""Several hosts that everybody knows from the start: --ips, or PaddleCloud's variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.errors import EnvironmentFault
from fleetrun.model import Endpoint, Member, Roster
from fleetrun.plan import hosts, origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.engines.ports import Ports
    from fleetrun.model import Device, Facts, Request
    from fleetrun.plan.hosts import Cloud


class Static:
    """The engine of a job whose hosts are listed; each has as many ranks as this one."""

    name = "static"

    def __init__(self, ports: Ports, *, dry: bool) -> None:
        self._ports = ports
        self._dry = dry

    def gather(
        self, request: Request, facts: Facts, groups: Sequence[tuple[Device, ...]]
    ) -> Roster:
        """Return all hosts with the same ports on each, and our place among them."""
        cloud = hosts.cloud(request, facts.environ)
        if cloud is not None:
            names, me, notes = cloud.names, cloud.me, _overruled(request, cloud)
            ports = hosts.cloud_ports(cloud, request, len(groups))
        elif request.run_mode in hosts.SERVER_MODES:
            names = hosts.named(request, facts.environ)
            me, notes = hosts.place(names, request, facts, dry=self._dry)
            ports = _with_servers(request, len(names))
        else:
            names = hosts.listed(request)
            me, notes = hosts.place(names, request, facts, dry=self._dry)
            first = hosts.FIRST_PORT if request.start_port is None else request.start_port
            ports = (hosts.port_range(first, len(groups)),) * len(names)
        members = tuple(
            # With servers, who has which devices follows from the roles.
            Member(name, own, tuple(groups) if len(own) == len(groups) else ((),) * len(own))
            for name, own in zip(names, ports, strict=True)
        )
        _check_distinct(members)
        # Several "hosts" on loopback are this one, trying out: each has an address to itself.
        address = names[me] if all(hosts.is_loopback(name) for name in names) else None
        self._ports.take(ports[me], address)
        # As in Paddle: every host knows the first endpoint without asking anyone.
        master = Endpoint(names[0], ports[0][0])
        if request.run_mode == "rpc":
            from fleetrun.plan import servers  # noqa: PLC0415 - only where Paddle may lack it

            notes += servers.check_paddle(request, facts)
            # There the first endpoint is a worker's own, and a store needs another port.
            master = Endpoint(names[0], ports[0][-1] + 1)
        return Roster(members, me, master, engine=self.name, notes=notes)

    def close(self) -> None:
        """Give the ports back."""
        self._ports.close()


def _with_servers(request: Request, number: int) -> tuple[tuple[int, ...], ...]:
    """Return the ports of each of NUMBER hosts: those of the lists, or the same on all."""
    from fleetrun.plan import servers  # noqa: PLC0415 - only for parameter servers

    crew = servers.crew(request)
    first = servers.FIRST_PORT if request.start_port is None else request.start_port
    rows = servers.ports(crew, first)
    found = rows if crew.hosts else rows * number
    return tuple(tuple(port for port in row if port is not None) for row in found)


def _overruled(request: Request, cloud: Cloud) -> tuple[str, ...]:
    """Say in a line what PaddleCloud's variables win over."""
    listed = tuple(name.strip() for name in request.ips)
    if not listed or listed == cloud.names:
        return ()
    note = (
        f"{origin.option(request, 'ips')} is not used: PADDLE_TRAINERS={','.join(cloud.names)} "
        "from PaddleCloud wins, as in Paddle. Export PADDLE_LAUNCH_WITH_ARGS=1 to use --ips."
    )
    return (note,)


def _check_distinct(members: Sequence[Member]) -> None:
    """Complain when two ranks would have the same endpoint."""
    seen: set[tuple[str, int]] = set()
    for member in members:
        for port in member.ports:
            if (member.host, port) in seen:
                raise EnvironmentFault(
                    f"Two ranks would have the endpoint {member.host}:{port}; "
                    "name each host and port once."
                )
            seen.add((member.host, port))
