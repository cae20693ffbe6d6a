"""What `tune --scaling` reads of its runs, and what it says."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from metricsrecords import a_record

from fleetrun.commands.tune import losses, scaling
from fleetrun.records import metricsfile, names
from fleetrun.records.tracefile import SpanRecord, TraceRecord

if TYPE_CHECKING:
    from pathlib import Path


def test_the_profiles_of_all_hosts_are_read_and_a_host_without_one_is_counted(
    tmp_path: Path,
) -> None:
    """The log folder may be shared, or the files of other hosts come home into `node1`."""
    job = Command(tmp_path, "exit 0", ranks=1)
    assert job.run().code == 0
    (run,) = (tmp_path / "log" / "runs").iterdir()
    plan = json.loads((run / names.PLAN).read_text())
    (run / names.PLAN).write_text(json.dumps({**plan, "nodes": ["10.0.0.1", "10.0.0.2"]}))

    def leave(folder: Path, number: int) -> None:
        about = {"rank": number, "first_step": 1, "summary": {"steps": 1, "seconds": {"step": 1.0}}}
        trace = {"schema": 1, "traceEvents": [], "otherData": about}
        (folder / names.trace(str(number))).write_text(json.dumps(trace))

    leave(run, 0)
    traces, unseen_hosts = scaling.read_traces(tmp_path / "log" / "latest")
    assert ([trace.rank for trace in traces], unseen_hosts) == ([0], 1)
    other = run / "node1"
    other.mkdir()
    for name in (names.EVENTS, names.PLAN, names.LOCK):
        (other / name).write_text(
            (run / name).read_text().replace('"node_rank": 0', '"node_rank": 1')
        )
    leave(other, 1)
    traces, unseen_hosts = scaling.read_traces(tmp_path / "log" / "latest")
    assert ([trace.rank for trace in traces], unseen_hosts) == ([0, 1], 0)


def test_the_slowest_link_between_hosts_is_told_with_communication(tmp_path: Path) -> None:
    job = Command(tmp_path, "exit 0", ranks=1)
    assert job.run().code == 0
    latest = tmp_path / "log" / "latest"
    assert scaling.slowest_link(latest) == ""
    links = (
        metricsfile.LinkUse("10.0.0.2", 0.0002, 200 << 20, 2.0, 9, 0),
        metricsfile.LinkUse("10.0.0.3", 0.0101, 35 << 20, 2.0, 9, 0),
        # Nothing was sent there.
        metricsfile.LinkUse("10.0.0.4", 0.5, 1000, 2.0, 9, 0),
    )
    for shown in (links, ()):
        metricsfile.append(str(latest / names.METRICS), a_record()._replace(links=shown))
    link = scaling.slowest_link(latest)
    assert link == (
        "the slowest link between hosts, from h to 10.0.0.3, carries 17.5 MiB a second with round "
        "trips of 10.1 ms"
    )
    large = losses.StepTimes(2.0, backward=2.0, link=link)
    (change,) = losses.changes(losses.StepTimes(1.0, backward=1.0), large, ())
    assert change.text.endswith(f"(--strategy=recommended); {link}")


def test_on_a_device_forward_and_backward_are_said_to_be_launches() -> None:
    sizes = [scaling.JobSize(number, ()) for number in (1, 2)]
    run = scaling.ScaledRun(losses.StepTimes(1.0, device="gpu"))
    (text,) = scaling._remarks({size: [run] for size in sizes}, ())
    assert text.startswith("On a gpu, forward and backward are the time to launch kernels")


@pytest.mark.parametrize(
    ("small", "why"),
    [
        (losses.StepTimes(2.0), "see the processors and what else runs on them"),
        (
            losses.StepTimes(2.0, queued_rank=0, queued=1.5),
            "rank 0 waits 1500.0 ms of a step for a processor",
        ),
    ],
)
def test_more_than_all_speed_is_explained(small: losses.StepTimes, why: str) -> None:
    sizes = [scaling.JobSize(number, ()) for number in (1, 2, 4)]
    steps = (small, losses.StepTimes(1.0), losses.StepTimes(1.9))
    runs = {size: [scaling.ScaledRun(step)] * 2 for size, step in zip(sizes, steps, strict=True)}
    (text,) = scaling._remarks(runs, ())
    assert text == (
        f"A step with 1 takes longer than with 2, so it is slowed down ({why}), and efficiencies "
        "mean little."
    )
    assert list(scaling._remarks({**runs, sizes[0]: runs[sizes[1]]}, ())) == []


def runs_of(*steps: losses.StepTimes) -> dict[scaling.JobSize, list[scaling.ScaledRun]]:
    """Return one run with each of STEPS, of 1, 2, ... ranks."""
    return {
        scaling.JobSize(number, ()): [scaling.ScaledRun(step)]
        for number, step in enumerate(steps, 1)
    }


def test_one_run_has_the_spread_of_its_steps() -> None:
    small, large = runs_of(losses.StepTimes(1.0, error=0.3), losses.StepTimes(2.0)).values()
    least, middle, most = scaling.efficiency(small, large)
    assert (round(least, 4), middle, most) == (0.3125, 0.5, 0.8)
    # Where there are several turns, their own spread counts.
    assert scaling.efficiency(small * 2, large * 2) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("times", [(0.101, 0.6509), (0.6509, 0.101), (0.2, 0.101, 0.6509)])
def test_all_figures_of_a_size_are_those_of_one_run(times: tuple[float, ...]) -> None:
    """As once measured: a table had the steps 650.9 and 1009.6 ms, and a speedup of 1.05."""
    sizes = [scaling.JobSize(number, ()) for number in (1, 2)]
    steps = [losses.StepTimes(seconds, forward=seconds) for seconds in times]
    slower = [losses.StepTimes(step.seconds * 1.25, forward=step.forward) for step in steps]
    slower[0] = losses.StepTimes(1.0096, forward=0.808)
    small, large = ([scaling.ScaledRun(step) for step in several] for several in (steps, slower))
    runs = dict(zip(sizes, (small, large), strict=True))
    figures = scaling.figures(sizes[1], runs)
    least, middle, most = figures.efficiency
    assert middle == pytest.approx(figures.base.seconds / figures.step.seconds)
    assert figures.speedup == pytest.approx(2 * middle)
    assert sum(figures.lost.values()) == pytest.approx(figures.step.seconds - figures.base.seconds)
    assert least <= middle <= most
    first = scaling.figures(sizes[0], runs)
    assert first.step == figures.base


def test_a_gain_is_told_with_the_spread_of_all_runs_without_the_change() -> None:
    """As once measured: a burst of load made the second run without it 2.6 times as slow."""
    usual, burst, changed = runs_of(*map(losses.StepTimes, (0.065, 0.171, 0.0624))).values()
    _, text = scaling.gain([*usual, *burst], changed)
    assert text == "1.04 times as fast (1.04 to 2.74)"
    assert scaling.gain(usual * 2, usual * 2)[1] == "1.00 times as fast"
    _, text = scaling.gain([*usual, *changed], changed * 2)
    assert text == "1.00 times as fast (1.00 to 1.04), no more than the spread of the runs"


def test_a_smallest_size_that_was_slowed_down_is_told() -> None:
    small = losses.StepTimes(0.057, forward=0.022)
    large = losses.StepTimes(0.06, forward=0.022, backward=0.03, waiting=0.03)
    (text,) = scaling._remarks(runs_of(small, large), ())
    assert text == (
        "A step with 1 has 27.0 ms of other time that one with 2 does not have, so it was slowed "
        "down, and efficiencies are too high."
    )
    assert list(scaling._remarks(runs_of(small, small), ())) == []


def test_steps_that_still_compile_are_told() -> None:
    """As measured with --warmup=3: five steps of 500 ms, and the others of 45 ms."""

    def profile(*lengths: float) -> TraceRecord:
        ends = list(accumulate(lengths))
        spans = [
            SpanRecord("step", "step", "training", end - length, length)
            for end, length in zip(ends, lengths, strict=True)
        ]
        return TraceRecord(
            0, 4, len(lengths), {"step": ends[-1] / len(lengths)}, None, tuple(spans)
        )

    usual = losses.breakdown([profile(*[0.045] * 14, 0.5, 0.045, 0.045)])
    large = losses.breakdown([profile(*[0.52] * 5, *[0.045] * 12)])
    (text,) = scaling._remarks(runs_of(usual, large), ())
    assert text == (
        "Steps take 12 times as long up to number 5 of those that count (compiling, caches, "
        "autotuning): raise --warmup by 5 or more, and --steps by as much."
    )
    assert list(scaling._remarks(runs_of(usual, usual), ())) == []


def test_what_the_first_rank_alone_does_at_each_size_slows_none_down() -> None:
    """As with checkpoints of 150 ms in each fifth step: with two ranks, the other one waits."""
    small = losses.StepTimes(0.0716, forward=0.022, backward=0.008, has_reducer=False)
    large = losses.StepTimes(0.0722, forward=0.022, backward=0.0462, waiting=0.031)
    large = large._replace(slowest=0, late=0.031, late_for="spends 31.0 ms longer in the script")
    (text,) = scaling._remarks(runs_of(small, large), ())
    assert text == (
        "With 2, rank 0 is 31.0 ms later than the others, and spends 31.0 ms longer in the script; "
        "with 1, a step contains the same, so its removal makes both faster."
    )
    # A rank that waits for another one need not wait for its data.
    waiting = small._replace(data=0.03)
    assert list(scaling._remarks(runs_of(waiting, large._replace(slowest=1)), ())) == []
    # A rank that only the larger size has is no part of the smallest.
    (text,) = scaling._remarks(runs_of(small, large._replace(slowest=1)), ())
    assert text.startswith("A step with 1 has 37.6 ms of other time")


def test_a_script_that_divides_a_global_batch_is_compared_with_a_divided_step() -> None:
    small = losses.StepTimes(0.1, data=0.01, forward=0.04, backward=0.04, update=0.01)
    large = losses.StepTimes(
        0.06, data=0.005, forward=0.02, backward=0.025, update=0.01, has_reducer=True
    )
    runs = runs_of(small, large)
    figures = scaling.figures(list(runs)[1], runs)
    assert figures.is_divided
    assert round(figures.speedup, 2) == 1.67
    # Data, forward and backward should take half as long, and the update does not.
    assert [round(share, 3) for share in figures.efficiency] == [0.917, 0.917, 0.917]
    assert {cause: round(s, 3) for cause, s in figures.lost.items() if round(s, 3)} == {
        "communication": 0.005
    }
    (text,) = scaling._remarks(runs, ())
    assert text == (
        "With 2 ranks, a forward takes 20.0 ms instead of 40.0, as if the script divided a global "
        "batch: so efficiencies compare with a step whose data, forward and backward are divided, "
        "too."
    )
    # A forward that waited for a processor is no larger batch.
    waited = small._replace(queued_rank=0, queued=0.03, queued_mean=0.03)
    assert not scaling.figures(list(runs)[1], runs_of(waited, large)).is_divided


def test_ranks_that_never_communicate_are_told() -> None:
    alone = losses.StepTimes(0.1, forward=0.1, has_reducer=False)
    (text,) = scaling._remarks(runs_of(alone, alone), ())
    assert text == (
        "With 2, no rank was seen to communicate: each seems to train by itself, without "
        "DataParallel, fleet or a collective."
    )
    for sign in ({"has_reducer": True}, {"program": 0.1}, {"buckets": 0.1}, {"collectives": 0.1}):
        assert losses.communicates(alone._replace(**sign))


def test_a_long_error_stands_below_the_table() -> None:
    fault = "it exited with 1: " + "x" * 200
    sizes = [scaling.JobSize(number, ()) for number in (1, 2)]
    run = scaling.ScaledRun(losses.StepTimes(1.0))
    shown = scaling.table({sizes[0]: [run], sizes[1]: [scaling.ScaledRun(fault=fault)]}, 0)
    *figures, last = shown.split("\n")
    assert last == f"2 failed: {fault}"
    assert max(map(len, figures)) < 100
