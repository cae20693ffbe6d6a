"""One host, which has all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.errors import UsageError
from fleetrun.model import Endpoint, Member, Roster
from fleetrun.plan import hosts, layout, origin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.engines import SelectedEngine
    from fleetrun.engines.ports import Ports
    from fleetrun.model import Facts, Request
    from fleetrun.plan.layout import ModeHosts, Slots

NAME = "local"
LOOPBACK = "127.0.0.1"


def find(request: Request, _environ: Mapping[str, str], places: ModeHosts) -> tuple[str, ...]:
    """Return the one named host, if any; UsageError for several without names."""
    if request.nnodes != "1":
        raise UsageError(
            f"{origin.option(request, 'nnodes')} names no hosts; give --ips, or the address where "
            "they meet, --master=HOST:PORT, the same on each host."
        )
    return places.hosts or hosts.listed(request)


def alone(
    held: Ports, slots: Slots, request: Request, host: str, *, several: bool = False
) -> Roster:
    """Return HOST alone, with free ports, or those from --start_port on, once they are HELD.

    SEVERAL hosts leave out the ports of the session.
    """
    (wanted,) = layout.ports(slots, request.start_port, several=several)
    held.take([port for port in wanted if port is not None])
    # The master's is a port of its own: a store may listen on the first endpoint.
    own = slots.master != "none"
    free = iter(held.free(wanted.count(None) + own))
    ports = tuple(next(free) if port is None else port for port in wanted)
    member = Member(host, ports, tuple(slot.devices for slot in slots.slots))
    return Roster((member,), 0, Endpoint(host, next(free) if own else ports[0]), engine=NAME)


def gather(
    found: SelectedEngine, held: Ports, request: Request, facts: Facts, slots: Slots
) -> Roster:
    """Return this host alone, with free ports, or those from --start_port on."""
    host, notes = _host(found, request, facts)
    return alone(held, slots, request, host)._replace(engine=NAME, notes=notes)


def _host(found: SelectedEngine, request: Request, facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Return the address that the endpoints have."""
    names = found.hosts
    if names:
        options, dry = found.places.options, found.dry
        _, notes = hosts.place(names, request, facts, options=options, dry=dry)
        return names[0], notes
    if request.host is None or hosts.is_own(request.host, facts):
        return request.host or LOOPBACK, ()
    named = origin.option(request, "host")
    return LOOPBACK, (f"{named} is not an address of this host: the ranks use {LOOPBACK}.",)
