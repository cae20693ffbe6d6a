"""Engines: how the hosts of a job find each other, each behind the same small protocol."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

from fleetrun.engines import local, static
from fleetrun.engines.ports import GuessedPorts, HeldPorts
from fleetrun.errors import UsageError
from fleetrun.plan import hosts, origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.model import Device, Facts, Request, Roster


class Engine(Protocol):
    """How hosts find each other.

    An engine whose roster can change later takes part in the supervisor too, by a `fileno()`.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The engine's name, as plans show it."""

    @abstractmethod
    def gather(
        self, request: Request, facts: Facts, groups: Sequence[tuple[Device, ...]]
    ) -> Roster:
        """Return who takes part: this host with one rank for each of GROUPS, and its peers."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held (ports, connections)."""


def choose(request: Request, facts: Facts, *, dry: bool, attempt: int = 0) -> Engine:
    """Return the engine that REQUEST asks for; a DRY one opens nothing.

    Each ATTEMPT looks for free ports elsewhere: the last one's may still be in TIME_WAIT.
    """
    seed = facts.pid + attempt
    ports = GuessedPorts(seed) if dry else HeldPorts(seed)
    if len(hosts.named(request, facts.environ)) > 1:
        return static.Static(ports, dry=dry)
    if request.nnodes != "1" and not _is_posted(request, facts):
        raise UsageError(
            f"{origin.option(request, 'nnodes')} names no hosts, and this version cannot wait for "
            "them to come; name them with --ips, the same on each host."
        )
    return local.Local(ports, dry=dry)


def _is_posted(request: Request, facts: Facts) -> bool:
    """Say whether a cluster has given this node its one process, and knows the others itself."""
    if request.run_mode not in hosts.SERVER_MODES:
        return False
    from fleetrun.plan import servers  # noqa: PLC0415 - only for parameter servers

    return servers.post(request, facts.environ) is not None
