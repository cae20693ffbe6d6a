"""What a mode says about a job: who takes part, and what is special about each of this host's."""

from typing import NamedTuple

from fleetrun.model import Endpoint, Peers, RankSpec


class Part(NamedTuple):
    """One process of this host: its log, whether the job waits for it, and what it waits for.

    `identity` says to it who it is; None: what every rank of a collective job is told.
    """

    spec: RankSpec
    name: str
    log: str
    essential: bool = True
    awaits: tuple[tuple[Endpoint, ...], ...] = ()
    identity: dict[str, str] | None = None


class Cast(NamedTuple):
    """All ranks of the job, and this host's part of them."""

    mode: str
    ranks: tuple[RankSpec, ...]
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    # The cluster says itself who a process is, and what it says stays.
    keeps_identity: bool = False
    peers: Peers | None = None
