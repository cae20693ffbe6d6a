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
        self,
        engine: SelectedEngine,
        held: Ports,
        request: Request,
        facts: Facts,
        slots: Slots,
    ) -> Roster:
        """Return the hosts with a port for each of SLOTS, once they are HELD, and our index."""


class EngineRow(NamedTuple):
    """A row of the table: the engine applies only if all VARIABLES and one OPTION are set."""

    file: str
    variables: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


# The first engine that finds its hosts is the job's.
ENGINES = (
    EngineRow("fleetrun.engines.role", ("TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST")),
    EngineRow("fleetrun.engines.paddlecloud", ("PADDLE_TRAINERS", "PADDLE_TRAINER_ID")),
    EngineRow("fleetrun.engines.static", options=("ips", "hosts")),
    EngineRow("fleetrun.engines.meeting", options=("master",)),
    EngineRow("fleetrun.engines.local"),
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
    for row in ENGINES:
        named = [getattr(place, name, ()) for name in row.options for place in (request, places)]
        is_asked = any(named) or not row.options
        if is_asked and all(environ.get(name, "").strip() for name in row.variables):
            factory = cast("EngineFactory", __import__(row.file, fromlist=("find",)))
            hosts = factory.find(request, environ, places)
            if hosts is not None:
                is_dry = request.dry_run is not None
                return SelectedEngine(factory, hosts, places, is_dry)
    raise AssertionError("the last engine takes every job")
