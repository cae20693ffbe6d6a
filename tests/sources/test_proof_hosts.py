"""Evidence of other hosts is taken for their own ranks alone, and is never too much."""

from __future__ import annotations

import base64
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.model import Endpoint, RankSpec
from fleetrun.session.exchange import PackedEvidence
from fleetrun.sources.proof_hosts import ProofOfHosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import LaunchPlan
    from fleetrun.session.driver import Session


def hosts() -> tuple[ProofOfHosts, Callable[[int, PackedEvidence], None], list[tuple[int, object]]]:
    """Return what judges for two hosts of two ranks, what hears, and what is taken."""
    hearers: dict[type, Callable[[int, Any], None]] = {}
    sent: list[PackedEvidence] = []
    session = SimpleNamespace(hearers=hearers, serves=True, to_coordinator=sent.append)
    ranks = tuple(
        RankSpec("TRAINER", rank, rank % 2, rank // 2, (), Endpoint("h", 1)) for rank in range(4)
    )
    made = ProofOfHosts(cast("Session", session))
    made.begin(cast("LaunchPlan", SimpleNamespace(generation=3, node_rank=0, ranks=ranks)))
    taken: list[tuple[int, object]] = []
    made.open(lambda place, record, _has_ended: taken.append((place, record)))
    return made, hearers[PackedEvidence], taken


def packed(text: bytes) -> str:
    return base64.b64encode(zlib.compress(text)).decode()


def test_a_host_speaks_for_its_own_ranks_of_this_generation() -> None:
    _, hear, taken = hosts()
    good = packed(b"{}")
    for node_rank, message in (
        (1, PackedEvidence(3, 2, has_ended=True, packed=good)),
        (1, PackedEvidence(3, 0, has_ended=True, packed=good)),
        (1, PackedEvidence(2, 2, has_ended=True, packed=good)),
        (1, PackedEvidence(3, 99, has_ended=True, packed=good)),
        (1, PackedEvidence(3, -1, has_ended=True, packed=good)),
        (0, PackedEvidence(3, 0, has_ended=True, packed=good)),
    ):
        hear(node_rank, message)
    assert taken == [(2, {})]


@given(
    st.text(max_size=50) | st.binary(max_size=50).map(lambda each: base64.b64encode(each).decode())
)
def test_what_is_no_evidence_is_none(text: str) -> None:
    _, hear, taken = hosts()
    hear(1, PackedEvidence(3, 2, has_ended=False, packed=text))
    assert taken == [(2, None)]


def test_what_unpacks_to_more_than_any_evidence_is_none() -> None:
    _, hear, taken = hosts()
    hear(1, PackedEvidence(3, 3, has_ended=False, packed=packed(b"x" * (64 << 20))))
    assert taken == [(3, None)]
