"""What all hosts of a job have agreed on before they meet, and the times that follow from it."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from typing import NamedTuple

# Who is cut off has killed its ranks so long before the others stop waiting for it.
_FENCE_S = 2.0
# A connection that breaks is made again: a firewall that resets for 3 s is no lost host.
_REJOIN_S = 4.5
# Planning takes milliseconds, on a host that has much to do seconds.
_PREPARE_S = 60.0


class Terms(NamedTuple):
    """How many hosts the job has, how often it starts again, and how long it waits for whom."""

    least: int
    most: int
    # The hosts in the order of their ranks, where they are known by name.
    names: tuple[str, ...] = ()
    # What each of them is known to call from; empty: anything.
    addresses: tuple[tuple[str, ...], ...] = ()
    max_restarts: int = 0
    rdzv_timeout_s: float = 600.0
    heartbeat_timeout_s: float = 10.0
    elastic_timeout_s: float = 30.0
    # Hosts beyond `most` that stand by.
    spares: int = 0
    # Whether a store outside of the job knows its roster, so that its coordinator can be replaced.
    has_store: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on when a host is lost, or one more comes."""
        return self.least < self.most

    @property
    def may_change(self) -> bool:
        """Whether a host that is lost can be done without, or another one take its place."""
        return self.is_elastic or self.spares > 0

    @property
    def prepare_s(self) -> float:
        """How long hosts may take to plan a generation, once its roster stands."""
        return _PREPARE_S

    @property
    def heartbeat_s(self) -> float:
        """How often a member shows that it is there."""
        return self.heartbeat_timeout_s / 5

    @property
    def look_s(self) -> float:
        """How often the coordinator looks for hosts that are silent."""
        return self.heartbeat_timeout_s / 10

    @property
    def unanswered_s(self) -> float:
        """When a member gives up a connection on which its heartbeats are not answered."""
        return self.heartbeat_timeout_s / 3

    @property
    def margin_s(self) -> float:
        """How long before the heartbeat timeout a host that is cut off has killed its ranks."""
        return min(_FENCE_S, self.heartbeat_timeout_s / 5)

    @property
    def fence_s(self) -> float:
        """How long after its last acknowledged heartbeat a host kills its ranks."""
        return self.heartbeat_timeout_s - self.margin_s

    @property
    def guard_s(self) -> float:
        """How long after that heartbeat its ranks are killed even if its launcher is stopped."""
        return self.fence_s + self.margin_s / 2

    @property
    def starts_again(self) -> bool:
        """Whether another generation may begin while a host that is lost still trains."""
        return self.may_change or self.max_restarts > 0

    @property
    def warning_s(self) -> float:
        """How long after its last acknowledged heartbeat a host asks its ranks to end."""
        return self.fence_s - self.margin_s / 2

    @property
    def rejoin_s(self) -> float:
        """How long after a connection broke its other end counts as lost."""
        return min(_REJOIN_S, 0.5 * self.heartbeat_timeout_s)

    @property
    def quarantine_s(self) -> float:
        """How long after the last word of a lost host no generation begins."""
        return max(self.heartbeat_timeout_s, self.fence_s + 1.0)
