"""The config of a rendezvous, which the coordinator sets, and the times that follow from it."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from typing import NamedTuple

from fleetrun.model import DEFAULTS

# A host that is cut off has killed its ranks this long before the others stop waiting for it.
_FENCE_S = 2.0


class RendezvousConfig(NamedTuple):
    """How many hosts the job has, how often it restarts, and how long it waits.

    Each launcher has its own until it learns the coordinator's, which then applies.
    """

    least: int
    most: int
    max_restarts: int = 0
    rdzv_timeout_s: float = DEFAULTS["rdzv_timeout_s"]
    heartbeat_timeout_s: float = DEFAULTS["heartbeat_timeout_s"]
    elastic_timeout_s: float = DEFAULTS["elastic_timeout_s"]
    # Hosts beyond `most` that stand by.
    spares: int = 0
    # How long ranks may take to end when asked to, and after what silence they hang; 0: never.
    grace_s: float = DEFAULTS["grace_s"]
    hang_timeout_s: float = 0.0
    # Whether a store outside of the job knows its roster, so that its coordinator can be replaced.
    has_store: bool = False

    def check(self) -> None:
        """Raise ValueError if no launcher can have sent it."""
        if not 1 <= self.least <= self.most or min(self) < 0:
            raise ValueError(self)

    @property
    def may_change(self) -> bool:
        """Whether the job can go on without a lost host, or replace it."""
        return self.least < self.most or self.spares > 0

    @property
    def heartbeat_s(self) -> float:
        """How often a member sends a heartbeat."""
        return self.heartbeat_timeout_s / 5

    @property
    def look_s(self) -> float:
        """How often the coordinator looks for silent hosts."""
        return self.heartbeat_timeout_s / 10

    @property
    def margin_s(self) -> float:
        """How long before the heartbeat timeout a host that is cut off kills its ranks."""
        return min(_FENCE_S, self.heartbeat_timeout_s / 5)

    @property
    def fence_s(self) -> float:
        """How long after its last acknowledged heartbeat a host kills its ranks."""
        return self.heartbeat_timeout_s - self.margin_s
