"""Whether any rank shows a sign of life, decided from samples alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fleetrun.run.proc import Io
from fleetrun.watch.life import GpuLoad, IdleClock, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

QUIET = Sample("S", output=10, cpu_s={7: 1.0})


def watched(*looks: dict[int, Sample], timeout_s: float = 20.0) -> IdleClock:
    """Return a clock after LOOKS, one every five seconds from 0 on."""
    clock = IdleClock(timeout_s)
    for number, samples in enumerate(looks):
        clock.see(samples, number * 5.0)
    return clock


def test_s61_silence_of_all_is_a_hang() -> None:
    clock = watched(*[{0: QUIET, 1: QUIET}] * 6)
    assert clock.is_hung(25.0)
    assert clock.silent_s(25.0) == 25.0
    assert not watched(*[{0: QUIET, 1: QUIET}] * 4).is_hung(15.0)


# In the last sample of one of two silent ranks.
@pytest.mark.parametrize(
    "sign",
    [
        {"output": 11},
        {"output": 0},
        {"beat": 3},
        {"calls": 1},
        {"state": "T"},
        {"state": "t"},
        {"io": Io(4096, 0, 0)},
        {"io": Io(0, 1 << 20, 0)},
        {"io": Io(0, 0, 1 << 20)},
        {"faults": 10_000},
        {"is_at_prompt": True},
        {"cpu_s": {7: 1.0, 8: 0.5}},
        {"cpu_s": {7: 1.5}},
    ],
)
def test_s62_any_sign_of_one_rank_is_life(sign: dict[str, Any]) -> None:
    looks = [{0: QUIET, 1: QUIET}] * 5
    assert not watched(*looks, {0: QUIET, 1: QUIET._replace(**sign)}).is_hung(25.0)


# Six samples of a rank, and whether they are a hang.
@pytest.mark.parametrize(
    ("sign", "is_hung"),
    [
        # It wakes up now and then to keep its connection alive.
        (lambda n: {"cpu_s": {7: n * 0.05}}, True),
        # With heartbeats it spins, logs, and sends, or writes a checkpoint.
        (lambda n: {"beat": 1, "cpu_s": {7: n * 5.0}}, True),
        (lambda n: {"beat": 1, "output": n * 50, "io": Io(n * 4096, 0, 0)}, True),
        (lambda n: {"beat": 1, "io": Io(n * 10_000_000, 0, 0)}, False),
        (lambda n: {"beat": 1, "calls": n}, True),
        # fleetrun reports the updates, and the rank evaluates.
        (lambda n: {"beat": 1, "is_scripts": False, "calls": n}, False),
    ],
)
def test_what_goes_on_is_life_or_none(
    sign: Callable[[int], dict[str, Any]], *, is_hung: bool
) -> None:
    clock = watched(*[{0: QUIET._replace(**sign(n))} for n in range(6)])
    clock.see({0: QUIET._replace(**sign(6))}, 30.0)
    assert clock.is_hung(30.0) is is_hung


def spun(stacks: Callable[[int], object], *, more: float = 0.0, count: int = 12) -> IdleClock:
    """Return a clock over a busy rank with STACKS, and a child that uses MORE seconds each second.

    It is 5 s * (COUNT - 1) after the first look.
    """
    clock = IdleClock(20.0)
    for n in range(count):
        at = n * 5.0
        clock.see({0: QUIET._replace(cpu_s={7: at, 8: at * more})}, at)
        if clock.wants_stacks(at):
            clock.see_stacks({7: stacks(n)}, at)
    return clock


def test_ranks_whose_stacks_stay_the_same_hang_however_busy_they_are() -> None:
    clock = spun(lambda _: "spin")
    assert clock.is_still
    assert clock.is_hung(55.0)


def test_a_stack_that_moves_or_a_program_without_one_is_life() -> None:
    assert not spun(lambda n: n % 3).is_hung(55.0)
    assert not spun(lambda _: "wait", more=0.9).is_hung(55.0)
    assert spun(lambda _: "wait", more=0.01).is_hung(55.0)


@pytest.mark.parametrize(
    ("load", "is_life"), [((100, 0), False), ((0, 0), False), ((60, 0), True), ((100, 40), True)]
)
def test_a_gpu_that_works_is_life(load: tuple[int, int], *, is_life: bool) -> None:
    clock = watched(*[{0: QUIET}] * 6)
    assert clock.see_gpus({"GPU-a": GpuLoad(*load, 5)}, 25.0) is is_life
    assert clock.is_hung(25.0) is not is_life
    # Memory that grows is work, too.
    assert clock.see_gpus({"GPU-a": GpuLoad(*load, 1 << 20)}, 26.0)


def test_a_launcher_that_was_stopped_begins_again() -> None:
    clock = watched(*[{0: QUIET}] * 3)
    clock.see({0: QUIET}, 1000.0)
    assert not clock.is_hung(1000.0)
