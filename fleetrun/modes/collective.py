"""Collective training: every rank is a trainer, ranks follow hosts, and all must finish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.model import Endpoint, RankSpec
from fleetrun.modes.cast import Cast, Part

if TYPE_CHECKING:
    from fleetrun.model import Roster

NAME = "collective"
ROLE = "TRAINER"


def cast(roster: Roster) -> Cast:
    """Return every rank of the job, and what this host starts of them."""
    ranks = layout(roster)
    parts = [
        Part(spec, f"{spec.role.lower()}.{spec.rank}", f"workerlog.{spec.local_rank}")
        for spec in ranks
        if spec.node_rank == roster.me
    ]
    return Cast(NAME, ranks, tuple(parts))


def layout(roster: Roster) -> tuple[RankSpec, ...]:
    """Return every rank of the job, host by host in the roster's order."""
    ranks: list[RankSpec] = []
    for node_rank, member in enumerate(roster.members):
        for local_rank, (port, devices) in enumerate(zip(member.ports, member.groups, strict=True)):
            endpoint = Endpoint(member.host, port)
            ranks.append(RankSpec(ROLE, len(ranks), local_rank, node_rank, devices, endpoint))
    return tuple(ranks)
