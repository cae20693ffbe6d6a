"""Whether any rank shows a sign of life, decided from samples alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fleetrun.watch.silence import Sample, SilenceClock

if TYPE_CHECKING:
    from collections.abc import Callable

QUIET = Sample(output=10, cpu_s=1.0)


def watched(*looks: dict[int, Sample]) -> SilenceClock:
    """Return a clock of 20 s after LOOKS, one every five seconds from 0 on."""
    clock = SilenceClock(20.0)
    for number, samples in enumerate(looks):
        clock.see(samples, number * 5.0)
    return clock


def test_s61_silence_of_all_is_a_hang() -> None:
    clock = watched(*[{0: QUIET, 1: QUIET}] * 6)
    assert clock.is_hang(25.0)
    assert clock.seconds(25.0) == 25.0
    assert not watched(*[{0: QUIET, 1: QUIET}] * 4).is_hang(15.0)


# In the last sample of one of two silent ranks.
@pytest.mark.parametrize(
    "sign",
    [
        {"output": 11},
        {"output": 0},
        {"beat": 3},
        {"calls": 1},
        {"is_held": True},
        {"written": 4096},
        {"fetched": 1 << 20},
        {"cpu_s": 1.5},
    ],
)
def test_s62_any_sign_of_one_rank_is_life(sign: dict[str, Any]) -> None:
    looks = [{0: QUIET, 1: QUIET}] * 5
    assert not watched(*looks, {0: QUIET, 1: QUIET._replace(**sign)}).is_hang(25.0)


# Seven samples of a rank, and whether they are a hang.
@pytest.mark.parametrize(
    ("sign", "is_hang"),
    [
        # It wakes up now and then to keep its connection alive.
        (lambda n: {"cpu_s": n * 0.05}, True),
        # It computes before its first collective; then it may spin.
        (lambda n: {"cpu_s": n * 5.0}, False),
        (lambda n: {"calls": 1, "cpu_s": n * 5.0}, True),
        # With heartbeats it spins, logs, and sends, or writes a checkpoint, or evaluates.
        (lambda n: {"beat": 1, "cpu_s": n * 5.0}, True),
        (lambda n: {"beat": 1, "output": n * 50, "written": n * 4096}, True),
        (lambda n: {"beat": 1, "written": n * 10_000_000}, False),
        (lambda n: {"beat": 1, "calls": n}, False),
        # It waits for a compiler, or measures by a program now and then.
        (lambda n: {"beat": 1, "cpu_s": n * 2.0, "programs": {7: n * 2.0}}, False),
        (lambda n: {"beat": 1, "cpu_s": n * 2.0, "programs": {n: 2.0}}, True),
    ],
)
def test_what_goes_on_is_life_or_none(
    sign: Callable[[int], dict[str, Any]], *, is_hang: bool
) -> None:
    clock = watched(*[{0: QUIET._replace(**sign(n))} for n in range(7)])
    assert clock.is_hang(30.0) is is_hang


def test_busy_ranks_hang_unless_a_stack_moves() -> None:
    busy = [{0: QUIET._replace(calls=1, cpu_s=n * 5.0)} for n in range(6)]
    clock = watched(*busy)
    assert [clock.still("spin", 25.0) for _ in range(4)] == [False, False, False, True]
    clock = watched(*busy)
    assert not any(clock.still(stacks, 25.0) for stacks in ("forward", "backward"))
    assert not clock.is_hang(25.0)
    # Where nobody computes, one look is enough.
    assert watched(*[{0: QUIET}] * 6).still("wait", 25.0)


def test_a_launcher_that_was_stopped_begins_again() -> None:
    clock = watched(*[{0: QUIET}] * 3)
    clock.see({0: QUIET}, 1000.0)
    assert not clock.is_hang(1000.0)
