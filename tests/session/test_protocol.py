"""The protocol of a session in random histories: whatever goes wrong, all hosts agree."""

from __future__ import annotations

import pytest
from examples import at_most
from simulation import QUIET, Chances, World, play

HISTORIES, MANY = 200, 20_000
_PARTS = 4


@pytest.mark.parametrize("part", range(_PARTS))
def test_whatever_happens_all_live_hosts_agree_and_none_waits_for_ever(part: int) -> None:
    for seed in range(part, at_most(HISTORIES), _PARTS):
        play(seed, World, Chances())


@pytest.mark.extended
@pytest.mark.parametrize("part", range(_PARTS))
def test_the_same_holds_where_each_host_has_options_of_its_own(part: int) -> None:
    for seed in range(part, at_most(HISTORIES), _PARTS):
        play(seed, World, Chances(), is_mixed=True)


def test_a_job_succeeds_where_nothing_goes_wrong() -> None:
    for seed in range(at_most(HISTORIES)):
        world = play(seed, World, QUIET)
        (roster,) = world.rosters.values()
        assert len(roster.entries) == world.config.most
        assert all(verdict.failure is None for verdict in world.launchers[0].verdicts.values())


# Launchers are killed or stopped while all train, and little else goes wrong.
KILLED = QUIET._replace(kill=0.4, reset=0.1, stop=0.3, lasts_s=(200.0,), spans_s=(80.0,))


@pytest.mark.parametrize("part", range(_PARTS))
def test_no_start_comes_before_the_ranks_of_a_lost_launcher_have_ended(part: int) -> None:
    for seed in range(part, at_most(HISTORIES), _PARTS):
        play(seed, World, KILLED, is_mixed=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("part", range(_PARTS))
def test_the_same_holds_in_twenty_thousand_histories(part: int) -> None:
    for seed in range(HISTORIES + part, MANY, _PARTS):
        play(seed, World, Chances())
