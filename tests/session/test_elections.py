"""A session whose coordinator is elected, in histories of chance: any host may be lost."""

from __future__ import annotations

import pytest
from elections import ElectedWorld
from simulation import Chances

from fleetrun.session.terms import Terms

HISTORIES, MANY = 60, 20_000
_PARTS = 4
# More is lost than in test_protocol.py, and less fails by itself.
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


def play(seed: int) -> None:
    most = 1 + seed % 5
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
        has_store=True,
    )
    world = ElectedWorld(seed, hosts=most + spares + surplus, terms=terms, chances=CHANCES)
    world.script()
    try:
        world.check(1000.0)
    except AssertionError as error:
        message = f"history {seed}: {error}"
        raise AssertionError(message) from error


def test_whoever_coordinates_no_two_generations_run_at_once_and_none_waits_for_ever() -> None:
    for seed in range(HISTORIES):
        play(seed)


# Who still stops reaches the next term of the same coordinator; who begins has known the last one;
# whose connection breaks as the job ends hears the verdict from one that leads no more.
@pytest.mark.parametrize("seed", [5344, 1859, 9101])
def test_whoever_reaches_another_term_of_a_coordinator_goes_on(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("part", range(_PARTS))
def test_the_same_holds_in_twenty_thousand_elections(part: int) -> None:
    for seed in range(HISTORIES + part, MANY, _PARTS):
        play(seed)
