"""Several hosts that find each other where --master says; each knows only itself at first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.model import Endpoint, Member, Roster
from fleetrun.plan import hosts, layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.engines import Found
    from fleetrun.engines.ports import Ports
    from fleetrun.model import Facts, Request
    from fleetrun.plan.layout import Places, Slots

NAME = "master"


def find(request: Request, _environ: Mapping[str, str], places: Places) -> tuple[str, ...] | None:
    """Return no host, as none is known by name; None where they do not meet at --master."""
    is_meeting = hosts.meets_at(request) is not None and not places.hosts
    return () if is_meeting else None


class Engine:
    """The engine of a job whose hosts meet: it gathers what this one brings along."""

    def __init__(self, found: Found, ports: Ports) -> None:
        self._found = found
        self._ports = ports

    def gather(self, request: Request, facts: Facts, slots: Slots) -> Roster:
        """Return this host alone; its ports are held, free ones or those from --start_port on.

        Where nothing says by which address others know it, `host` is empty: the session does.
        """
        host = request.host or ("" if facts.network is None else facts.network.ip)
        notes: tuple[str, ...] = ()
        if self._found.dry:
            host = host or facts.hostname
            notes = ("a dry run meets nobody: this host is shown as if it were alone.",)
        (wanted,) = layout.ports(slots, request.start_port, several=True)
        self._ports.take([port for port in wanted if port is not None])
        own = slots.master != "none"
        free = iter(self._ports.free(wanted.count(None) + own))
        ports = tuple(next(free) if port is None else port for port in wanted)
        member = Member(host, ports, tuple(slot.devices for slot in slots.slots))
        master = Endpoint(host, next(free) if own else ports[0])
        return Roster((member,), 0, master, engine=NAME, notes=notes)

    def close(self) -> None:
        """Give the ports back."""
        self._ports.close()
