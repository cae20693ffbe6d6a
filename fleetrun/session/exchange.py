"""Messages between the hosts of a job beside the protocol: logs, silence, evidence.

The coordinator does not depend on them. A process is named by its place among all
ranks of the job, which every host has planned alike, so no message names a file.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
from typing import Annotated, NamedTuple, TypeAlias

from fleetrun.model import LaunchPlan, RankSpec
from fleetrun.session.messages import Count

# Raw bytes of a log in one message; in base64 they fit into a text of the codec's.
LONGEST_PART = 32 * 1024


class LogPart(NamedTuple):
    """Bytes of a log of SIZE bytes from OFFSET on, in base64; `attempt` is the generation."""

    process: int
    attempt: int
    offset: Count
    size: Count
    data: str
    is_error_log: bool = False

    def check(self) -> None:
        """Raise ValueError if no launcher can have sent it."""
        if self.offset > self.size:
            raise ValueError(self.offset)


class LogTaken(NamedTuple):
    """The coordinator's host has written a part of a log, and takes the next one."""


class LogsSent(NamedTuple):
    """A host has sent all logs of its ranks."""


class Dismissed(NamedTuple):
    """The coordinator's host awaits no more logs of this one: the launcher may end."""


class RankStack(NamedTuple):
    """Where the main thread of a rank stands: functions, files and lines, the innermost first."""

    process: int
    frames: tuple[tuple[str, str, int], ...]


class EndedRank(NamedTuple):
    """A rank that exited with 0, SECONDS ago: any other end ends the job."""

    process: int
    seconds: Annotated[float, (0.0).__le__]


class SilentHost(NamedTuple):
    """The ranks of a host have shown no life for SECONDS; 0: they do.

    The first such message has their stacks.
    """

    generation: int
    seconds: Annotated[float, (0.0).__le__]
    has_ranks: bool
    stacks: tuple[RankStack, ...] = ()
    # As of `Hung`.
    sign: str = "life"
    ended: tuple[EndedRank, ...] = ()


class PackedEvidence(NamedTuple):
    """A rank's evidence of its strategy: its file, packed by zlib and base64."""

    generation: int
    process: int
    has_ended: bool
    packed: str


class PackedCollectives(NamedTuple):
    """A rank's record of its collectives: its file, packed by zlib and base64."""

    generation: int
    process: int
    packed: str


def rank_of(
    message: PackedEvidence | PackedCollectives, node_rank: int, plan: LaunchPlan
) -> RankSpec | None:
    """Return the rank that MESSAGE of the host NODE_RANK is about; None if it is not its own.

    It must be another host than this one, and the generation that of PLAN.
    """
    if message.generation != plan.generation or not 0 <= message.process < len(plan.ranks):
        return None
    spec = plan.ranks[message.process]
    return spec if spec.node_rank == node_rank != plan.node_rank else None


FromMember: TypeAlias = LogPart | LogsSent | SilentHost | PackedEvidence | PackedCollectives
FromCoordinator: TypeAlias = LogTaken | Dismissed
