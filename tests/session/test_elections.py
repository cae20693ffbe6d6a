"""A session whose coordinator is elected, in random histories: any host may be lost."""

from __future__ import annotations

import pytest
from elections import ApartWorld, ElectedWorld, KilledWorld
from examples import at_most
from simulation import QUIET, Chances, play

HISTORIES, MANY = 30, 20_000
_PARTS = 4
# More hosts are lost than in test_protocol.py, and fewer ranks fail.
CHANCES = Chances(
    failure=0.1,
    kill=0.25,
    crash=0.25,
    short_cut=0.3,
    long_cut=0.25,
    departs=0.2,
    never_comes=0.01,
    no_plan=0.01,
    trouble=0.03,
)
# Jobs that end while something goes wrong.
SHORT = QUIET._replace(lasts_s=(3.0, 8.0), spans_s=(10.0,))


def test_whoever_coordinates_no_two_generations_run_at_once_and_none_waits_for_ever() -> None:
    for seed in range(at_most(HISTORIES)):
        play(seed, ElectedWorld, CHANCES, has_store=True)


@pytest.mark.parametrize("kind", [ElectedWorld, KilledWorld])
def test_an_elastic_job_succeeds_even_if_its_coordinator_is_killed(
    kind: type[ElectedWorld],
) -> None:
    for seed in range(1, 2 * HISTORIES, 2):
        world = play(seed, kind, QUIET, has_store=True)
        ends = {
            host.name: [verdict.failure for verdict in host.verdicts.values() if verdict.is_final]
            for host in world.launchers
            if host.is_alive and host.rosters
        }
        assert all(end == [None] for end in ends.values()), (seed, ends)
        assert len(ends) >= world.config.most - (kind is KilledWorld), (seed, ends)


@pytest.mark.extended
def test_the_same_holds_where_each_host_has_options_of_its_own() -> None:
    for seed in range(at_most(HISTORIES)):
        play(seed, ElectedWorld, CHANCES, has_store=True, is_mixed=True)


@pytest.mark.extended
def test_the_same_holds_where_hosts_reach_etcd_and_not_each_other() -> None:
    for seed in range(at_most(HISTORIES)):
        play(seed, ApartWorld, CHANCES, has_store=True)


# Its ranks still stop when it reaches the next term of the coordinator at the same address.
@pytest.mark.parametrize("seed", [1498, 1897])
def test_a_host_that_reaches_another_term_of_a_coordinator_goes_on(seed: int) -> None:
    play(seed, ElectedWorld, CHANCES, has_store=True)


# As the job ends, a host's connections break; the coordinator's key is gone, not its verdict.
@pytest.mark.parametrize("seed", [11, 278])
def test_a_host_that_is_cut_off_as_the_job_ends_hears_how_it_ended(seed: int) -> None:
    play(seed, ElectedWorld, SHORT._replace(short_cut=0.9, reset=0.9), has_store=True)


@pytest.mark.parametrize("seed", [24, 191])
def test_a_host_that_waits_does_not_call_a_coordinator_whose_key_is_gone(seed: int) -> None:
    chances = SHORT._replace(short_cut=0.9, reset=0.9, astray=0.6, down=0.2)
    play(seed, ElectedWorld, chances, has_store=True)


# A launcher is stopped before its ranks start, and finds the order to start when it goes on.
def test_a_host_that_was_stopped_does_not_start_ranks_of_an_earlier_generation() -> None:
    chances = SHORT._replace(short_cut=0.7, reset=0.7, failure=0.2, stop=0.2)
    play(10678, ElectedWorld, chances, has_store=True)


# Two standby hosts once gave way to each other for ever: neither reached enough hosts.
@pytest.mark.parametrize("seed", [354, 1192])
def test_hosts_that_are_too_few_end_although_each_may_lead(seed: int) -> None:
    play(seed, ApartWorld, CHANCES, has_store=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("part", range(_PARTS))
def test_the_same_holds_in_twenty_thousand_elections(part: int) -> None:
    for seed in range(HISTORIES + part, MANY, _PARTS):
        play(seed, ElectedWorld if seed % 4 < 2 else ApartWorld, CHANCES, has_store=True)
