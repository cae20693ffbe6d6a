"""The protocol of a session, in histories of chance: whatever goes wrong, all hosts agree."""

from __future__ import annotations

import pytest
from simulation import Chances, World

from fleetrun.session.terms import Terms

HISTORIES, MANY = 400, 20_000
_PARTS = 4


def play(seed: int) -> None:
    most = 1 + seed % 5
    # Every other history is of a job that goes on without a host that is lost; some have hosts that
    # stand by, and in some more come than have a place.
    least = max(1, most - 2) if seed % 2 else most
    spares = (0, 0, 1, 2)[seed // 5 % 4]
    surplus = (0, 0, 1)[seed // 20 % 3]
    terms = Terms(
        least,
        most,
        max_restarts=seed % 3,
        rdzv_timeout_s=30.0,
        elastic_timeout_s=5.0,
        spares=spares,
    )
    world = World(seed, hosts=most + spares + surplus, terms=terms, chances=Chances())
    world.script()
    try:
        world.check(1000.0)
    except AssertionError as error:
        message = f"history {seed}: {error}"
        raise AssertionError(message) from error


@pytest.mark.parametrize("part", range(_PARTS))
def test_whatever_happens_all_live_hosts_agree_and_none_waits_for_ever(part: int) -> None:
    for seed in range(part, HISTORIES, _PARTS):
        play(seed)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("part", range(_PARTS))
def test_the_same_holds_in_twenty_thousand_histories(part: int) -> None:
    for seed in range(HISTORIES + part, MANY, _PARTS):
        play(seed)
