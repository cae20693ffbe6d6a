"""The evidence of all hosts' ranks, at the coordinator's host: one table for the whole job."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import TYPE_CHECKING

from fleetrun.records import reading
from fleetrun.session.exchange import PackedEvidence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleetrun.model import LaunchPlan
    from fleetrun.session.driver import Session

# What a rank says of its strategy is some thousand bytes; a file that is no evidence may be more.
_LONGEST, _LONGEST_PACKED = 1 << 20, 60_000


class ProofOfHosts:
    """Sends the evidence of the ranks here to the coordinator's host of SESSION, or takes it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def judges(self) -> bool:
        """Whether this host judges for all."""
        return self._session.serves

    def open(self, take: Callable[[int, Mapping[str, object] | None, bool], None]) -> None:
        """Begin; TAKE is called with a rank, its record, and whether it has ended.

        Ranks are counted as in the plan, which this host must have of the same generation.
        """

        def receive(node_rank: int, message: PackedEvidence) -> None:
            ranks = self._plan.ranks
            if (
                message.generation == self._plan.generation
                and 0 <= message.process < len(ranks)
                and ranks[message.process].node_rank == node_rank != self._plan.node_rank
            ):
                take(message.process, _unpacked(message.packed), message.has_ended)

        self._session.hearers[PackedEvidence] = receive

    def begin(self, plan: LaunchPlan) -> None:
        """Know the ranks of a generation."""
        self._plan = plan

    def report(self, process: int, record: Mapping[str, object] | None, *, has_ended: bool) -> None:
        """Send the last RECORD of a rank."""
        import json  # as `reading` does

        text = json.dumps(record).encode()
        packed = base64.b64encode(zlib.compress(text)).decode("ascii") if record else ""
        if len(packed) > _LONGEST_PACKED:
            packed = ""
        message = PackedEvidence(self._plan.generation, process, has_ended, packed)
        self._session.to_coordinator(message)


def _unpacked(packed: str) -> Mapping[str, object] | None:
    """Return what was packed; None where that is nothing, or no evidence can be as long."""
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.b64decode(packed, validate=True), _LONGEST)
    except (binascii.Error, ValueError, zlib.error):
        return None
    return reading.parse(text) if unpacking.eof else None
