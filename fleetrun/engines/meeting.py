"""Several hosts that meet at the address of --master; each knows only itself at first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.engines.local import alone
from fleetrun.plan import hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.engines import SelectedEngine
    from fleetrun.engines.ports import Ports
    from fleetrun.model import Facts, Request, Roster
    from fleetrun.plan.layout import ModeHosts, Slots

NAME = "master"


def find(
    request: Request, _environ: Mapping[str, str], places: ModeHosts
) -> tuple[str, ...] | None:
    """Return no host, as none is known by name; None where they do not meet at --master."""
    is_meeting = hosts.meets_at(request) is not None and not places.hosts
    return () if is_meeting else None


class Engine:
    """The engine of a job whose hosts meet: it gathers what this one brings along."""

    def __init__(self, found: SelectedEngine, ports: Ports) -> None:
        self._found = found
        self._ports = ports

    def gather(self, request: Request, facts: Facts, slots: Slots) -> Roster:
        """Return this host alone; its ports are held, free ones or those from --start_port on.

        `host` is empty where its address for the others is not known; the session finds it.
        """
        host = request.host or ("" if facts.network is None else facts.network.ip)
        notes: tuple[str, ...] = ()
        if self._found.dry:
            host = host or facts.hostname
            notes = ("a dry run meets nobody: this host is shown as if it were alone.",)
        roster = alone(self._ports, slots, request, host, several=True)
        return roster._replace(engine=NAME, notes=notes)

    def close(self) -> None:
        """Release the ports."""
        self._ports.close()
