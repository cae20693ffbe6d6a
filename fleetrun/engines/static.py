"""Several hosts that are listed, by --ips or by the lists of a mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetrun.engines import SelectedEngine
from fleetrun.engines.ports import Ports
from fleetrun.model import Endpoint, Facts, Member, Request, Roster
from fleetrun.plan import hosts, layout
from fleetrun.plan.layout import ModeHosts, Slots

NAME = "static"


def find(
    request: Request, _environ: Mapping[str, str], places: ModeHosts
) -> tuple[str, ...] | None:
    """Return the hosts if several are named."""
    names = places.hosts or hosts.listed(request)
    return names if len(names) > 1 else None


def assign(
    engine: SelectedEngine, held: Ports, request: Request, facts: Facts, slots: Slots
) -> Roster:
    """Return all hosts with the same ports on each, and our place among them."""
    names = engine.hosts
    me, notes = hosts.place(names, request, facts, options=engine.places.options, dry=engine.dry)
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
    return Roster(members, me, master, engine=NAME)
