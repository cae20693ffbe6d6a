"""One host, which has all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from fleetrun.engines import SelectedEngine
from fleetrun.engines.ports import Ports
from fleetrun.errors import UsageError
from fleetrun.model import Endpoint, Facts, Member, Request, Roster
from fleetrun.plan import hosts, layout, origin
from fleetrun.plan.layout import ModeHosts, Slots

NAME = "local"
LOOPBACK = "127.0.0.1"


def find(request: Request, _environ: Mapping[str, str], places: ModeHosts) -> tuple[str, ...]:
    """Return the named host, if any; raises UsageError for several unnamed ones."""
    if request.nnodes != "1":
        raise UsageError(
            f"{origin.option(request, 'nnodes')} names no hosts; give --ips, or the address where "
            "they meet, --master=HOST:PORT, the same on each host."
        )
    return places.hosts or hosts.listed(request)


def alone(
    held: Ports, slots: Slots, request: Request, host: str, *, several: bool = False
) -> Roster:
    """Return a roster of HOST with free ports, or those from --start_port on, once HELD.

    SEVERAL: leave out the ports of the session.
    """
    (requested,) = layout.ports(slots, request.start_port, several=several)
    held.take([port for port in requested if port is not None])
    # The master's is a port of its own: a store may listen on the first endpoint.
    has_master = slots.master != "none"
    free = iter(held.free(requested.count(None) + has_master))
    ports = tuple(next(free) if port is None else port for port in requested)
    member = Member(host, ports, tuple(slot.devices for slot in slots.slots))
    return Roster((member,), 0, Endpoint(host, next(free) if has_master else ports[0]), engine=NAME)


def assign(
    engine: SelectedEngine, held: Ports, request: Request, facts: Facts, slots: Slots
) -> Roster:
    """Return this host alone, with free ports, or those from --start_port on."""
    host, notes = _host(engine, request, facts)
    return alone(held, slots, request, host)._replace(notes=notes)


def _host(engine: SelectedEngine, request: Request, facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Return the address that the endpoints have."""
    names = engine.hosts
    if names:
        options, dry = engine.places.options, engine.dry
        _, notes = hosts.place(names, request, facts, options=options, dry=dry)
        return names[0], notes
    if request.host is None or hosts.is_own(request.host, facts):
        return request.host or LOOPBACK, ()
    named = origin.option(request, "host")
    return LOOPBACK, (f"{named} is not an address of this host: the ranks use {LOOPBACK}.",)
