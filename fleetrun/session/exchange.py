"""Messages between the hosts of a job beside the protocol: silence and collectives.

The coordinator does not depend on them. A process is named by its place among all
ranks of the job, which every host has planned alike, so no message names a file.
"""

# No `from __future__ import annotations`: the codec checks every field by its annotation.
from typing import Annotated, NamedTuple, TypeAlias


class RankStack(NamedTuple):
    """Where the main thread of a rank stands: functions, files and lines, the innermost first."""

    process: int
    frames: tuple[tuple[str, str, int], ...]


class SilentHost(NamedTuple):
    """The ranks of a host have shown no life for SECONDS; 0: they do.

    The first such message has their stacks.
    """

    generation: int
    seconds: Annotated[float, (0.0).__le__]
    has_ranks: bool
    stacks: tuple[RankStack, ...] = ()


class PackedCollectives(NamedTuple):
    """A rank's record of its collectives: its file, packed by zlib and base64."""

    generation: int
    process: int
    packed: str


FromMember: TypeAlias = SilentHost | PackedCollectives
