"""The protocol of a session, in histories of chance: whatever goes wrong, all hosts agree."""

from __future__ import annotations

import pytest
from examples import at_most
from simulation import Chances, World, play

HISTORIES, MANY = 400, 20_000
_PARTS = 4


@pytest.mark.parametrize("part", range(_PARTS))
def test_whatever_happens_all_live_hosts_agree_and_none_waits_for_ever(part: int) -> None:
    for seed in range(part, at_most(HISTORIES), _PARTS):
        play(seed, World, Chances())


@pytest.mark.parametrize("part", range(_PARTS))
def test_the_same_holds_where_each_host_has_options_of_its_own(part: int) -> None:
    for seed in range(part, at_most(HISTORIES), _PARTS):
        play(seed, World, Chances(), is_mixed=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("part", range(_PARTS))
def test_the_same_holds_in_twenty_thousand_histories(part: int) -> None:
    for seed in range(HISTORIES + part, MANY, _PARTS):
        play(seed, World, Chances())
