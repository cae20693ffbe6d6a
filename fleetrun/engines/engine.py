"""The engine of a job: the first one that finds its hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fleetrun.engines import listed, meeting, paddlecloud
from fleetrun.engines.ports import Ports
from fleetrun.model import Facts, Request, Roster
from fleetrun.plan.layout import ModeHosts, Slots

# `find` returns the hosts known by name; None if the engine does not apply. `assign` returns all
# hosts with a port for each slot, once these are held, and our index among them.
_ENGINES = (
    (paddlecloud.find, paddlecloud.assign),
    (listed.find, listed.assign),
    (meeting.find, meeting.assign),
    (listed.find_one, listed.assign_one),
)


class Engine(NamedTuple):
    """The engine of a job, and what it knows before this host is examined.

    `hosts` are those known by name; `places` is what the mode's options say, with these hosts.
    """

    assigned: Callable[[ModeHosts, Ports, Request, Facts, Slots], Roster]
    hosts: tuple[str, ...]
    places: ModeHosts
    is_dry: bool

    @staticmethod
    def find(request: Request, environ: Mapping[str, str], places: ModeHosts) -> Engine:
        """Return the engine for REQUEST and ENVIRON."""
        for find, assign in _ENGINES:
            hosts = find(request, environ, places)
            if hosts is not None:
                return Engine(
                    assign, hosts, places._replace(hosts=hosts), request.dry_run is not None
                )
        raise AssertionError("the last engine takes every job")

    def ports(self, pid: int, attempt: int = 0) -> Ports:
        """Return where ports for ATTEMPT come from; a dry run opens none.

        Each attempt uses other ports: those of the last one may still be in TIME_WAIT.
        """
        return Ports(pid + attempt, is_dry=self.is_dry)

    def assign(self, held: Ports, request: Request, facts: Facts, slots: Slots) -> Roster:
        """Return the hosts with a port for each of SLOTS, once they are HELD, and our index."""
        return self.assigned(self.places, held, request, facts, slots)
