"""Engines: each finds the hosts of a job in one environment, behind a common protocol."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast

from fleetrun.engines.ports import GuessedPorts, Ports
from fleetrun.model import Facts, Request, Roster
from fleetrun.plan.layout import ModeHosts, Slots


class EngineFactory(Protocol):
    """The interface of an engine's module."""

    @abstractmethod
    def find(
        self, request: Request, environ: Mapping[str, str], places: ModeHosts
    ) -> tuple[str, ...] | None:
        """Return the hosts known by name; None if this engine does not apply."""

    @abstractmethod
    def assign(
        self, engine: SelectedEngine, held: Ports, request: Request, facts: Facts, slots: Slots
    ) -> Roster:
        """Return the hosts with a port for each of SLOTS, once they are HELD, and our index."""


# The module of each engine, and the variables and options of which one must be set. The first
# engine that finds its hosts is the job's.
ENGINES = (
    ("fleetrun.engines.paddlecloud", ("PADDLE_TRAINERS", "TRAINING_ROLE"), ()),
    ("fleetrun.engines.static", (), ("ips", "hosts")),
    ("fleetrun.engines.meeting", (), ("master",)),
    ("fleetrun.engines.local", (), ()),
)


class SelectedEngine(NamedTuple):
    """The engine of a job, and what it knows before this host is examined.

    `hosts` are those known by name; `places` is what the mode's options say.
    """

    factory: EngineFactory
    hosts: tuple[str, ...]
    places: ModeHosts
    dry: bool

    def ports(self, pid: int, attempt: int = 0) -> Ports:
        """Return where ports for ATTEMPT come from; a dry run opens none.

        Each attempt uses other ports: those of the last one may still be in TIME_WAIT.
        """
        ports = GuessedPorts if self.dry else Ports
        return ports(pid + attempt)

    def assign(self, held: Ports, request: Request, facts: Facts, slots: Slots) -> Roster:
        """Return the hosts with a port for each of SLOTS, once they are HELD, and our index."""
        return self.factory.assign(self, held, request, facts, slots)


def find(request: Request, environ: Mapping[str, str], places: ModeHosts) -> SelectedEngine:
    """Return the engine for REQUEST and ENVIRON."""
    for module, variables, options in ENGINES:
        named = [getattr(place, name, ()) for name in options for place in (request, places)]
        named += [environ.get(name, "").strip() for name in variables]
        if any(named) or not (variables or options):
            factory = cast("EngineFactory", __import__(module, fromlist=("find",)))
            hosts = factory.find(request, environ, places)
            if hosts is not None:
                is_dry = request.dry_run is not None
                return SelectedEngine(factory, hosts, places, is_dry)
    raise AssertionError("the last engine takes every job")
