"""Sessions in random histories: whatever goes wrong, all hosts agree.

`PYTHONPATH=tests .venv/bin/python tests/session/test_fuzz.py FIRST COUNT [store]` plays some.
"""

from __future__ import annotations

import random
import sys
from functools import partial

import pytest
from session_world import WOKEN_S, Host, Violation, World

from fleetrun.session.messages import RendezvousConfig

HISTORIES, MANY = 300, 20_000


def harm(world: World, chance: random.Random, *, has_store: bool) -> Host:
    """Let something go wrong with a host, and return that."""
    victim, at, kind = chance.choice(world.hosts), chance.uniform(0.0, 90.0), chance.random()
    # Some are cut off for good.
    until = at + (chance.uniform(0.1, 25.0) if chance.random() < 0.9 else 10_000.0)
    if kind < 0.1:
        victim.stands_still_when_ready = True
    elif kind < 0.35:
        world.at(at, victim.die)
    elif kind < 0.6:
        world.at(at, partial(victim.stand_still, chance.uniform(0.1, 25.0)))
    elif kind < 0.8 or not has_store:
        other = chance.choice((None, world.hosts[0]))
        world.at(at, partial(world.cut, until, victim, other))
    else:
        world.at(at, partial(world.cut, until, victim, ""))
    return victim


def harass(world: World, chance: random.Random, config: RendezvousConfig, first: Host) -> None:
    """Let ranks of a host fail often, and hosts leave, come back, and wait for places."""
    world.weak, world.wakes_s = chance.choice(world.hosts).number, 2 * WOKEN_S
    if chance.random() < 0.5:
        chance.choice(world.hosts).stands_still_when_ready = True
    if config.has_store:
        world.at(chance.uniform(5.0, 60.0), partial(part, world, chance.uniform(0.3, 0.9), first))
    if not config.may_change:
        return
    for _ in range(chance.randrange(1, 3)):
        leaver = chance.choice(world.hosts)
        at = chance.uniform(5.0, 90.0)
        world.at(at, chance.choice((leaver.leave, leaver.die)))
        if chance.random() < 0.5:
            world.at(at + chance.uniform(0.5, 5.0), lambda: coordinator(world, first).leave())
        other = Host(world, chance.choice((leaver.number, 8)), config, first)
        world.at(at + chance.uniform(-20.0, 20.0), other.begin)


def coordinator(world: World, first: Host) -> Host:
    """Return the coordinator, or FIRST if there is none."""
    serving = (host for host in world.hosts if host.session.serves and not host.is_dead)
    return next(serving, first)


def part(world: World, share: float, first: Host) -> None:
    """Cut the coordinator off the store, and from all after a SHARE of the heartbeat timeout."""
    host, until = coordinator(world, first), world.now + 60.0
    world.cut(until, host, "")
    later = world.now + share * host.config.heartbeat_timeout_s
    world.at(later, partial(world.cut, until, host, None))


def play(seed: int, *, has_store: bool = False) -> World:
    """Play one history, and check how it ends."""
    world, chance, is_harsh = World(seed), random.Random(-seed - 1), bool(seed // 4 % 2)
    most = chance.randrange(1, 5)
    least = chance.randrange(1, most + 1) if chance.random() < 0.5 else most
    config = RendezvousConfig(
        least,
        most,
        spares=chance.choice((0, 0, 0, 1)),
        max_restarts=chance.randrange(3) + 2 * is_harsh,
        rdzv_timeout_s=60.0,
        heartbeat_timeout_s=chance.choice((2.0, 10.0)),
        elastic_timeout_s=chance.choice((1.0, 10.0)),
        grace_s=chance.choice((1.0, 5.0)),
        has_store=has_store,
    )
    if has_store:
        # With delays as long as the timeout, an elastic job would start again for ever.
        world.longest_delay_s = config.heartbeat_timeout_s / 5
    first = Host(world, 0, config, None)
    others = [Host(world, number, config, first) for number in range(1, most)]
    for host in (first, *others):
        world.at(chance.uniform(0.0, 8.0), host.begin)
    harmed = {harm(world, chance, has_store=has_store) for _ in range(chance.randrange(4))}
    if config.may_change and chance.random() < 0.5:
        late = Host(world, 9, config, first)
        world.at(chance.uniform(5.0, 60.0), late.begin)
    if is_harsh:
        harass(world, random.Random(~seed), config, first)
    world.run()
    if not has_store:
        verdicts = {
            (host.verdict.generation, host.code)
            for host in world.hosts
            if host.verdict is not None and not is_own(host)
        }
        assert len(verdicts) <= 1, (seed, verdicts, world.log[-30:])
    is_patient = config.heartbeat_timeout_s > world.longest_delay_s * 4
    spares = {host for host in world.hosts if host.is_spare} - world.harmed
    if is_patient and not has_store and first not in world.harmed:
        assert all(host.code == first.code for host in spares), (seed, world.log[-30:])
    if not harmed and not is_harsh and is_patient and not config.may_change:
        # Nothing went wrong but ranks, so all have heard the end, with one code.
        assert all(host.verdict is not None for host in world.hosts), (seed, world.log[-30:])
        assert len({host.code for host in world.hosts}) == 1, (seed, world.log[-30:])
    return world


def is_own(host: Host) -> bool:
    """Whether HOST has concluded alone, as it lost the coordinator or was refused."""
    failure = None if host.verdict is None else host.verdict.failure
    alone = ("cut off", "was lost", "refused", "stopped or without")
    has_lost = failure is not None and any(word in failure.what for word in alone)
    return has_lost or (host.verdict is not None and bool(host.verdict.given_up))


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("part", range(2))
def test_whatever_happens_all_hosts_agree_and_no_two_generations_train_at_once(
    part: int, *, has_store: bool
) -> None:
    for seed in range(part, HISTORIES, 4):
        play(seed + 2 * has_store, has_store=has_store)


def test_a_coordinator_that_stood_still_for_less_than_the_fence_blames_itself() -> None:
    play(8208)


def generation_after(seed: int, silent_s: float) -> int:
    """Return the last generation of two hosts whose etcd is silent once, for SILENT_S seconds."""
    world = World(seed)
    config = RendezvousConfig(1, 2, elastic_timeout_s=1.0, grace_s=1.0, has_store=True)
    first = Host(world, 0, config, None)
    hosts = [first, Host(world, 1, config, first)]
    for host in hosts:
        world.at(0.0, host.begin)
        world.at(8.0, partial(world.cut, 8.0 + silent_s, host, ""))
    world.run()
    return max(
        0 if host.session.roster is None else host.session.roster.generation for host in hosts
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_silence_of_etcd_costs_no_more_restarts_than_its_loss(seed: int) -> None:
    # The lease is one of 10 s. A coordinator that went on would restart the job again and again,
    # without the time for a promise to the hosts.
    assert generation_after(seed, 5.0) <= generation_after(seed, 12.0)


@pytest.mark.parametrize(("seed", "has_store"), [(5241, False), (21850, True)])
def test_who_stood_by_and_lost_the_coordinator_waits_with_a_limit(
    seed: int, *, has_store: bool
) -> None:
    play(seed, has_store=has_store)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("part", range(2))
def test_the_same_holds_in_twenty_thousand_histories(part: int, *, has_store: bool) -> None:
    for seed in range(HISTORIES + part, MANY, 4):
        play(seed + 2 * has_store, has_store=has_store)


def is_wrong(seed: int, *, has_store: bool) -> bool:
    """Play a history, and print what went wrong."""
    try:
        play(seed, has_store=has_store)
    except (AssertionError, Violation) as error:
        print(f"{seed}: {str(error)[:3000]}")
        return True
    return False


def main(first: int, count: int, *, has_store: bool) -> None:
    """Play COUNT histories, and print which go wrong."""
    wrong = sum(is_wrong(seed, has_store=has_store) for seed in range(first, first + count))
    print(f"{wrong} of {count} are wrong")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), has_store="store" in sys.argv)
