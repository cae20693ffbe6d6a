"""Findings about connections to other hosts: each one, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from findings import bad

from fleetrun.doctor import peers
from fleetrun.doctor.findings import ERROR, WARNING, Finding
from fleetrun.session.introductions import Connect, HostDescription, Peer

CARD = HostDescription("node1", "0.1.0", "3.11.7", "3.3.1", "12.6", "2.22.3", "570.1")
PORTS = (Connect(6070, "connected"), Connect(6071, "connected"))
WELL = Peer("node2", PORTS, CARD._replace(host="node2"), 0.001, 0.0005)


def judged(peer: Peer) -> list[Finding]:
    return list(peers.judge([peer], CARD))


def test_a_peer_that_is_well_has_nothing_to_mend() -> None:
    assert bad(judged(WELL)) == []


@pytest.mark.parametrize(
    ("changed", "check", "level"),
    [
        ({"connects": (PORTS[0], Connect(6071, "silent", "timed out"))}, "connection", ERROR),
        ({"connects": (PORTS[0], Connect(6071, "refused"))}, "connection", WARNING),
        ({"connects": (PORTS[0], Connect(6071, "another program"))}, "connection", ERROR),
        ({"connects": (Connect(6070, "silent", "no answer"),), "card": None}, "connection", ERROR),
        ({"ahead_s": 30.0}, "clock", WARNING),
        ({"ahead_s": -30.0}, "clock", WARNING),
        ({"card": CARD._replace(paddle="2.6.2")}, "versions", ERROR),
        ({"card": CARD._replace(paddle="")}, "versions", ERROR),
        ({"card": CARD._replace(fleetrun="0.0.9")}, "versions", ERROR),
        ({"card": CARD._replace(nccl="2.19.3")}, "versions", ERROR),
        ({"card": CARD._replace(driver="535.1")}, "versions", WARNING),
        ({"card": CARD._replace(python="3.10.1")}, "versions", WARNING),
    ],
)
def test_what_is_not_well_is_the_one_finding(
    changed: dict[str, Any], check: str, level: str
) -> None:
    assert bad(judged(WELL._replace(**changed))) == [(check, level)]


def test_a_slow_way_is_no_wrong_clock() -> None:
    assert bad(judged(WELL._replace(ahead_s=1.9, accuracy_s=1.5))) == []
