"""Whether any rank is alive, and which one lags, decided from samples alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from plans import generation

from fleetrun.model import ExitStatus, Rules
from fleetrun.run import policy
from fleetrun.run.events import (
    Exited,
    Finish,
    Gather,
    Gathered,
    Hung,
    SignalAll,
    Started,
    TimerExpired,
)
from fleetrun.watch.hang import Comparison, DeepSample, GpuLoad, IdleClock, Lag, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

QUIET = Sample("S", 1.0, 10, 0)
IDLE = DeepSample({7: 1.0}, 0)


def watched(
    *looks: tuple[dict[int, Sample], dict[int, DeepSample]], timeout_s: float = 20.0
) -> IdleClock:
    """Return a clock after LOOKS, one every five seconds from 0 on."""
    clock = IdleClock(timeout_s)
    clock.restart(0.0)
    for number, (signs, depths) in enumerate(looks):
        if clock.look(signs, number * 5.0):
            clock.look_closer(depths, number * 5.0)
    return clock


def silence(count: int) -> list[tuple[dict[int, Sample], dict[int, DeepSample]]]:
    return [({0: QUIET, 1: QUIET}, {0: IDLE, 1: IDLE})] * count


def test_s61_silence_of_all_is_a_hang() -> None:
    clock = watched(*silence(6))
    assert clock.is_hung(25.0)
    assert clock.silent_s(25.0) == 25.0
    assert not watched(*silence(4)).is_hung(15.0)


# The last sample of one of two silent ranks.
@pytest.mark.parametrize(
    ("sign", "depth"),
    [
        *(
            (QUIET._replace(**sign), IDLE)
            for sign in (
                {"output": 11},
                {"output": 0},
                {"beat": 3},
                {"calls": 1},
                {"cpu_s": 1.2},
                {"state": "T"},
                {"state": "t"},
            )
        ),
        *(
            (QUIET, IDLE._replace(**depth))
            for depth in (
                {"written": 4096},
                {"disk_waits": {7: 12}},
                {"is_at_prompt": True},
                {"cpu_s": {7: 1.0, 8: 0.5}},
                {"cpu_s": {7: 1.5}},
            )
        ),
    ],
)
def test_s62_any_sign_or_work_of_one_rank_is_life(sign: Sample, depth: DeepSample) -> None:
    looks = silence(6)
    looks[5] = ({0: QUIET, 1: sign}, {0: IDLE, 1: depth})
    assert not watched(*looks).is_hung(25.0)


# Six samples of a rank, and whether they are a hang.
@pytest.mark.parametrize(
    ("sign", "depth", "is_hung"),
    [
        # It wakes up now and then to keep its connection alive.
        (lambda n: {"cpu_s": 1.0 + n * 0.05}, lambda n: {"cpu_s": {7: n * 0.05}}, True),
        # With heartbeats it spins, logs, and sends, or writes a checkpoint.
        (lambda n: {"beat": 1, "cpu_s": n * 5.0}, lambda n: {"cpu_s": {7: n * 5.0}}, True),
        (lambda n: {"beat": 1, "output": n * 50}, lambda n: {"written": n * 4096}, True),
        (lambda _: {"beat": 1}, lambda n: {"written": n * 10_000_000}, False),
        (lambda n: {"beat": 1, "calls": n}, lambda _: {}, True),
        # It waits for a disk again and again, or for a file server that is gone.
        (lambda _: {}, lambda n: {"disk_waits": {7: n}}, False),
        (lambda _: {}, lambda n: {"disk_waits": {7: 12} if n else {}}, True),
        # It waits for a processor all the time, gets one rarely, or has just woken up.
        (lambda _: {}, lambda _: {"runnable": {7: {7: (1.0, 3)}}}, False),
        (lambda _: {}, lambda n: {"runnable": {7: {8: (n * 4.9, n)}}}, False),
        (lambda _: {}, lambda n: {"runnable": {7: {7: (n * 0.1, n)}}}, True),
        (lambda _: {}, lambda n: {"runnable": {7: {7: (1.0, 3)}} if n % 2 else {}}, True),
        # fleetrun reports the updates, and the rank evaluates.
        (lambda n: {"beat": 1, "is_scripts": False, "calls": n}, lambda _: {}, False),
    ],
)
def test_what_goes_on_is_life_or_none(
    sign: Callable[[int], dict[str, Any]], depth: Callable[[int], dict[str, Any]], *, is_hung: bool
) -> None:
    looks = [({0: QUIET._replace(**sign(n))}, {0: IDLE._replace(**depth(n))}) for n in range(6)]
    assert watched(*looks).is_hung(25.0) is is_hung


def busy(
    count: int,
    *,
    stacks: Callable[[int], dict[int, object]] = lambda _: {7: "spin"},
    beat: int = 0,
    pids: tuple[int, ...] = (7,),
    more: Mapping[str, int] | None = None,
) -> IdleClock:
    """Return a clock after COUNT looks, one each five seconds, at a rank whose processors are busy.

    MORE counts up at each look. Its processes PIDS use a processor each; STACKS are what a sample
    at a look finds.
    """
    clock = IdleClock(20.0)
    clock.restart(0.0)
    for number in range(count):
        at = number * 5.0
        used = dict.fromkeys(pids, at)
        sign = QUIET._replace(cpu_s=at, beat=beat, is_scripts=False, output=number * bool(beat))
        if clock.look({0: sign}, at):
            counts: dict[str, Any] = {name: number * count for name, count in (more or {}).items()}
            depth = DeepSample(used, 0)
            clock.look_closer({0: depth._replace(**counts)}, at)
        if clock.wants_stacks(at):
            clock.see_stacks(stacks(number), at)
    return clock


@pytest.mark.parametrize("beat", [0, 1])
def test_s61_busy_processors_under_stacks_that_do_not_move_are_a_hang(beat: int) -> None:
    # The first sample comes after a quarter of the timeout, the last one a timeout after that.
    assert not busy(5, beat=beat).is_hung(20.0)
    clock = busy(6, beat=beat)
    assert clock.is_hung(25.0)
    assert clock.is_still
    assert clock.silent_s(25.0) == 20.0


@pytest.mark.parametrize("more", [{"fetched": 70_000}, {"moved": 400_000}, {"faults": 1500}])
def test_s62_work_under_stacks_that_do_not_move_is_life(more: dict[str, int]) -> None:
    assert not busy(20, more=more).is_hung(95.0)
    little = {name: value // 10 for name, value in more.items()}
    assert busy(20, more=little).is_hung(95.0)


def test_s62_a_stack_that_moves_is_life() -> None:
    assert not busy(20, stacks=lambda number: {7: f"line {number}"}).is_hung(95.0)
    # So does another process.
    assert not busy(20, stacks=lambda number: {7: "spin", number: "new"}).is_hung(95.0)


def test_s62_a_busy_process_without_a_stack_is_life() -> None:
    assert not busy(20, pids=(7, 8)).is_hung(95.0)
    assert not busy(20, more={"reaped_s": 2}).is_hung(95.0)
    assert busy(20, pids=(7,), more={"reaped_s": 1}).is_hung(95.0)


def test_s62_who_gets_no_processor_beside_a_rank_that_spins_is_alive() -> None:
    starved = {8: {8: (1.0, 3)}}
    clock = IdleClock(20.0)
    clock.restart(0.0)
    for at in range(0, 100, 5):
        if clock.look({0: QUIET._replace(cpu_s=float(at))}, at):
            clock.look_closer({0: DeepSample({7: float(at), 8: 1.0}, 0, runnable=starved)}, at)
        if clock.wants_stacks(at):
            clock.see_stacks({7: "spin"}, at)
    assert not clock.is_hung(95.0)


@pytest.mark.parametrize(
    ("loads", "is_working"),
    [
        # A kernel of NCCL that waits, or none: no work.
        ([GpuLoad(100, 0, 5), GpuLoad(100, 1, 5)], False),
        ([GpuLoad(0, 0, 5), GpuLoad(0, 0, 5)], False),
        # Kernels that start and end, or use the memory; memory that is allocated.
        ([GpuLoad(0, 0, 5), GpuLoad(60, 0, 5)], True),
        ([GpuLoad(100, 0, 5), GpuLoad(100, 30, 5)], True),
        ([GpuLoad(0, 0, 5), GpuLoad(0, 0, 1 << 20)], True),
    ],
)
def test_a_gpu_that_waits_in_a_kernel_does_not_work(loads: list[GpuLoad], is_working: bool) -> None:
    clock = busy(6)
    assert not clock.see_gpus({"GPU-a": loads[0]}, 25.0)
    assert clock.see_gpus({"GPU-a": loads[1]}, 25.0) is is_working
    assert clock.is_hung(25.0) is not is_working


def test_what_happened_while_we_were_stopped_is_unknown() -> None:
    clock = watched(*silence(3))
    assert not clock.look({0: QUIET}, 3600.0)
    assert not clock.is_hung(3600.0)


def test_one_look_is_no_comparison() -> None:
    clock = IdleClock(1.0)
    clock.restart(0.0)
    clock.look({0: QUIET}, 0.0)
    assert clock.look({0: QUIET}, 1.5)
    clock.look_closer({0: IDLE}, 1.5)
    assert not clock.is_hung(1.5)


def lags(*shares: tuple[float, ...], seconds: float = 40.0) -> list[Lag]:
    """Return the finding when the ranks use these SHARES of a processor in turn."""
    comparison = Comparison()
    used = [0.0] * len(shares[0])
    lags_seen = []
    for number in range(int(seconds / 5) + 1):
        lag = comparison.see(dict(enumerate(used)), number * 5.0)
        if lag is not None:
            lags_seen.append(lag)
        share = shares[min(number, len(shares) - 1)]
        used = [seconds + 5.0 * part for seconds, part in zip(used, share, strict=True)]
    return lags_seen


def test_s63_an_idle_rank_among_busy_ones_is_named_once() -> None:
    assert lags((1.0, 0.0, 1.0, 0.9)) == [Lag((1,), (0, 2, 3), is_idle=True, seconds=30.0)]


def test_s63_a_busy_rank_for_which_the_others_wait_is_named() -> None:
    assert lags((0.0, 0.01, 1.0)) == [Lag((2,), (0, 1), is_idle=False, seconds=30.0)]


def test_s63_a_lasting_lag_is_told_again_but_ever_more_seldom() -> None:
    assert len(lags((1.0, 0.0, 1.0), seconds=30 + 60 + 120)) == 3


@pytest.mark.parametrize(
    "shares",
    [
        [(1.0, 1.0, 1.0)],
        [(0.0, 0.0, 0.0)],
        [(1.0, 0.1, 1.0)],
        [(1.0, 0.0, 0.1)],
        [(1.0, 1.0, 0.0, 0.0)],
        [(1.0, 0.0, 1.0)] * 3 + [(1.0, 0.9, 1.0)] + [(1.0, 0.0, 1.0)] * 5,
        [(1.0,)],
    ],
)
def test_s63_no_one_lags_who_is_not_alone_for_long(shares: list[tuple[float, ...]]) -> None:
    assert lags(*shares) == []


def test_a_new_set_of_ranks_begins_anew() -> None:
    comparison = Comparison()
    for number in range(6):
        comparison.see({0: number * 5.0, 1: 0.0}, number * 5.0)
    assert comparison.see({0: 30.0, 1: 0.0, 2: 0.0}, 30.0) is None


def running(*, max_restarts: int = 0) -> tuple[policy.PolicyState, Rules]:
    rules = Rules(max_restarts=max_restarts)
    state, _ = policy.begin(0.0, 1.0)
    state, _ = policy.step(state, Gathered(0, generation([True, True]), 0.0), Rules())
    for index in range(2):
        state, _ = policy.step(state, Started(index, f"rank {index}", 10 + index, 0.0), rules)
    return state, rules


def test_s61_a_hang_stops_the_job_with_124() -> None:
    state, rules = running()
    state, actions = policy.step(state, Hung(20.0, 25.0, odd=("rank 1",)), rules)
    assert actions == (SignalAll(policy.TERM),)
    for index in range(2):
        ended = Exited(index, f"rank {index}", ExitStatus(signum=15), 26.0)
        state, actions = policy.step(state, ended, rules)
    assert isinstance(actions[-1], Finish)
    assert actions[-1].outcome.exit_code == 124
    assert "rank 1" in actions[-1].outcome.describe()


def test_s61_a_hang_counts_as_a_failure_for_restarts() -> None:
    state, rules = running(max_restarts=1)
    state, _ = policy.step(state, Hung(20.0, 25.0), rules)
    for index in range(2):
        ended = Exited(index, f"rank {index}", ExitStatus(signum=15), 26.0)
        state, actions = policy.step(state, ended, rules)
    assert state.deadline is not None
    state, actions = policy.step(state, TimerExpired(state.deadline), rules)
    assert actions == (Gather(1),)


def test_a_hang_of_a_job_that_ends_is_none() -> None:
    state, rules = running()
    state, _ = policy.step(state, Exited(0, "rank 0", ExitStatus(code=3), 1.0), rules)
    assert policy.step(state, Hung(20.0, 25.0), rules) == (state, ())
