"""Hosts that are listed, by --ips or by the options of a mode; or one host, which has all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetrun.engines.ports import Ports
from fleetrun.errors import UsageError
from fleetrun.model import Endpoint, Facts, Member, Request, Roster
from fleetrun.plan import hosts, layout, origin
from fleetrun.plan.layout import ModeHosts, Slots

LOOPBACK = "127.0.0.1"


def find(
    request: Request, _environ: Mapping[str, str], places: ModeHosts
) -> tuple[str, ...] | None:
    """Return the hosts if several are named."""
    names = places.hosts or hosts.listed(request)
    return names if len(names) > 1 else None


def assign(places: ModeHosts, held: Ports, request: Request, facts: Facts, slots: Slots) -> Roster:
    """Return all hosts with the same ports on each, and our place among them."""
    names = places.hosts
    me, notes = hosts.place(places, request, facts)
    first = slots.first_port if request.start_port is None else request.start_port
    rows = layout.ports(slots, first, several=True)
    ports = rows if slots.hosts else rows * len(names)
    return roster(held, names, me, ports, slots)._replace(notes=notes)


def roster(
    held: Ports,
    names: Sequence[str],
    me: int,
    rows: Sequence[Sequence[int | None]],
    slots: Slots,
) -> Roster:
    """Return the hosts NAMES with their ports, one of ROWS for each; this host's are HELD."""
    members = tuple(
        Member(
            name,
            tuple(port for port in row if port is not None),
            tuple(slot.devices for slot in slots.on(name)),
        )
        for name, row in zip(names, rows, strict=True)
    )
    # Several "hosts" on loopback are this one, trying out: each has an address to itself.
    address = names[me] if all(hosts.is_loopback(name) for name in names) else None
    held.take(members[me].ports, address)
    # As in Paddle: every host knows the first endpoint without asking anyone.
    first = members[0].ports
    master = Endpoint(names[0], first[-1] + 1 if slots.master == "own" else first[0])
    return Roster(members, me, master, engine="static")


def find_one(request: Request, _environ: Mapping[str, str], places: ModeHosts) -> tuple[str, ...]:
    """Return the named host, if any; raises UsageError for several unnamed ones."""
    if request.nnodes != "1":
        raise UsageError(
            f"{origin.option(request, 'nnodes')} names no hosts; give --ips, or the address where "
            "they meet, --master=HOST:PORT, the same on each host."
        )
    return places.hosts or hosts.listed(request)


def assign_one(
    places: ModeHosts, held: Ports, request: Request, facts: Facts, slots: Slots
) -> Roster:
    """Return this host alone, with free ports, or those from --start_port on."""
    host, notes = request.host or LOOPBACK, tuple[str, ...]()
    if places.hosts:
        host = places.hosts[0]
        _, notes = hosts.place(places, request, facts)
    elif request.host is not None and not hosts.is_own(request.host, facts):
        named = origin.option(request, "host")
        host = LOOPBACK
        notes = (f"{named} is not an address of this host: the ranks use {LOOPBACK}.",)
    return alone(held, slots, request, host)._replace(notes=notes)


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
    return Roster((member,), 0, Endpoint(host, next(free) if has_master else ports[0]))
