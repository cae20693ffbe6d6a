"""What the hosts of a job tell each other beside the protocol: logs, silence, evidence.

Neither coordinator.py nor member.py decides by any of it. Processes go by their place among all
ranks of the job, which every host has planned alike, so nothing here names a file.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
from typing import NamedTuple, TypeAlias

from fleetrun.model import LaunchPlan, RankSpec

# Raw bytes of a log in one message; in base64 they fit into a text of the codec's.
LONGEST_PART = 32 * 1024


class SendLog(NamedTuple):
    """The coordinator's host wants LENGTH bytes of a log from OFFSET on; -1: its last ones."""

    process: int
    # As the coordinator's host counts, which has been there from the first one on.
    attempt: int
    offset: int
    length: int = LONGEST_PART
    # Whether the log of standard error is meant, where that has one of its own.
    is_error_log: bool = False

    def check(self) -> None:
        """Raise ValueError where no launcher can have said it."""
        if not (0 < self.length <= 1 << 20 and self.offset >= -1):
            raise ValueError(self.length)


class LogPart(NamedTuple):
    """Bytes of a log of SIZE bytes, from OFFSET on, in base64; none: there are no more."""

    process: int
    attempt: int
    offset: int
    size: int
    data: str
    is_error_log: bool = False

    def check(self) -> None:
        """Raise ValueError where no launcher can have said it."""
        if self.offset < 0 or self.size < 0 or self.offset > self.size:
            raise ValueError(self.offset)


class Dismissed(NamedTuple):
    """The coordinator's host has what it wants: the launcher may end."""


class SilentHost(NamedTuple):
    """The ranks of a host have shown no life for SECONDS; 0: they do."""

    generation: int
    seconds: float
    has_ranks: bool

    def check(self) -> None:
        """Raise ValueError where no launcher can have said it."""
        if self.seconds < 0:
            raise ValueError(self.seconds)


class WantStacks(NamedTuple):
    """No host has shown any life for SECONDS: all must fetch the stacks of their ranks."""

    generation: int
    seconds: float


class RankStack(NamedTuple):
    """Where the main thread of a rank stands: functions, files and lines, the innermost first."""

    process: int
    frames: tuple[tuple[str, str, int], ...]


class Stacks(NamedTuple):
    """Where the ranks of a host stand; `went_on` is one that has gone on meanwhile, or -1."""

    generation: int
    stacks: tuple[RankStack, ...]
    went_on: int
    # As of `Hung`.
    sign: str
    # Forked children that wait for locks: whose, which, and where.
    deadlocked: tuple[tuple[int, int, str], ...]
    # Endpoints that are not reached, and which process tries to; -1: its launcher did, before.
    unreached: tuple[tuple[int, str], ...]


class PackedEvidence(NamedTuple):
    """What a rank says of its strategy: `packed` is its file, by zlib and base64."""

    generation: int
    process: int
    has_ended: bool
    packed: str


class PackedCollectives(NamedTuple):
    """What a rank has recorded of its collectives: `packed` is its file, by zlib and base64."""

    generation: int
    process: int
    packed: str


class ServerEnded(NamedTuple):
    """A process that others may await has ended well, so it will never listen."""

    generation: int
    process: int


def rank_of(
    message: PackedEvidence | PackedCollectives, node_rank: int, plan: LaunchPlan
) -> RankSpec | None:
    """Return the rank that the host NODE_RANK tells of; None if that is not one of its own.

    It must be another host than this one, and the generation that of PLAN.
    """
    if message.generation != plan.generation or not 0 <= message.process < len(plan.ranks):
        return None
    spec = plan.ranks[message.process]
    return spec if spec.node_rank == node_rank != plan.node_rank else None


FromMember: TypeAlias = (
    LogPart | SilentHost | Stacks | PackedEvidence | PackedCollectives | ServerEnded
)
FromCoordinator: TypeAlias = SendLog | Dismissed | WantStacks | ServerEnded
