"""The evidence of all hosts' ranks, at the coordinator's host: one table for the whole job."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import TYPE_CHECKING

from fleetrun.session.exchange import PackedEvidence

if TYPE_CHECKING:
    from collections.abc import Callable

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

    def open(self, take: Callable[[int, int, bytes | None, bool], None]) -> None:
        """Begin; TAKE is called with generation, rank, evidence, and whether the rank has ended.

        Ranks are counted as in the plan, which this host must have of the same generation.
        """

        def receive(node_rank: int, message: PackedEvidence) -> None:
            ranks = self._plan.ranks
            if (
                message.generation == self._plan.generation
                and 0 <= message.process < len(ranks)
                and ranks[message.process].node_rank == node_rank != self._plan.node_rank
            ):
                text = _unpacked(message.packed)
                take(message.generation, message.process, text, message.has_ended)

        self._session.hearers[PackedEvidence] = receive

    def begin(self, plan: LaunchPlan) -> None:
        """Know the ranks of a generation."""
        self._plan = plan

    def report(self, process: int, text: bytes | None, *, has_ended: bool) -> None:
        """Send the evidence TEXT of a rank."""
        packed = base64.b64encode(zlib.compress(text)).decode("ascii") if text else ""
        if len(packed) > _LONGEST_PACKED:
            packed = ""
        message = PackedEvidence(self._plan.generation, process, has_ended, packed)
        self._session.to_coordinator(message)


def _unpacked(packed: str) -> bytes | None:
    """Return what was packed; None where that is nothing, or no evidence can be as long."""
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.b64decode(packed, validate=True), _LONGEST)
    except (binascii.Error, ValueError, zlib.error):
        return None
    return text if text and unpacking.eof else None
