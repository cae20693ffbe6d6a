"""One host: the ranks are all here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.model import Endpoint, Member, Roster
from fleetrun.plan import hosts, origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.engines.ports import Ports
    from fleetrun.model import Device, Facts, Request

LOOPBACK = "127.0.0.1"


class Local:
    """The engine of a job on one host."""

    name = "local"

    def __init__(self, ports: Ports, *, dry: bool) -> None:
        self._ports = ports
        self._dry = dry

    def gather(
        self, request: Request, facts: Facts, groups: Sequence[tuple[Device, ...]]
    ) -> Roster:
        """Return this host alone, with free ports, or those from --start_port on."""
        if request.run_mode in hosts.SERVER_MODES:
            return self._with_servers(request, facts)
        host, notes = self._host(request, facts)
        if request.run_mode == "rpc":
            from fleetrun.plan import servers  # noqa: PLC0415 - only where Paddle may lack it

            notes += servers.check_paddle(request, facts)
        if request.start_port is None:
            # The master's is a port of its own: a store may listen on the first endpoint.
            *ports, master = self._ports.free(len(groups) + 1)
        else:
            ports = list(hosts.port_range(request.start_port, len(groups)))
            self._ports.take(ports)
            (master,) = self._ports.free(1)
        member = Member(host, tuple(ports), tuple(groups))
        return Roster((member,), 0, Endpoint(host, master), engine=self.name, notes=notes)

    def _with_servers(self, request: Request, facts: Facts) -> Roster:
        """Return this host alone, with a port for each server, trainer and others."""
        from fleetrun.plan import servers  # noqa: PLC0415 - only for parameter servers

        post = servers.post(request, facts.environ)
        if post is not None:
            # The cluster has chosen the port, and the others know it.
            member = Member(post.endpoint.host, (post.endpoint.port,), ((),))
            return Roster((member,), 0, post.endpoint, engine="cloud")
        host, notes = self._host(request, facts)
        (wanted,) = servers.ports(servers.crew(request), request.start_port)
        self._ports.take([port for port in wanted if port is not None])
        free = iter(self._ports.free(wanted.count(None)))
        ports = tuple(next(free) if port is None else port for port in wanted)
        member = Member(host, ports, ((),) * len(ports))
        # Nobody meets at a master here; gloo has a port among those of the member.
        return Roster((member,), 0, Endpoint(host, ports[0]), engine=self.name, notes=notes)

    def close(self) -> None:
        """Give the ports back."""
        self._ports.close()

    def _host(self, request: Request, facts: Facts) -> tuple[str, tuple[str, ...]]:
        """Return the address that the endpoints have."""
        names = hosts.named(request, facts.environ)
        if names:
            _, notes = hosts.place(names, request, facts, dry=self._dry)
            return names[0], notes
        if request.host is None or hosts.ours(request.host, facts):
            return request.host or LOOPBACK, ()
        stranger = origin.option(request, "host")
        return LOOPBACK, (f"{stranger} is no address of this host: the ranks use {LOOPBACK}.",)
