"""The rank that the others wait for, and the reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from metricsrecords import a_record

from fleetrun.commands.tune import scaling
from fleetrun.records import metricsfile, names
from fleetrun.records.tracefile import SpanRecord, TraceRecord

if TYPE_CHECKING:
    from pathlib import Path


def rank(number: int, data_s: float, forward_s: float, queued_s: float) -> TraceRecord:
    ready_s = data_s + forward_s
    parts = [("data", 0.0, data_s), ("forward", data_s, forward_s)]
    parts += [("backward", ready_s, 1.0 - ready_s)]
    spans = [SpanRecord(kind, kind, "training", begin, length) for kind, begin, length in parts]
    step = SpanRecord("step 1", "step", "training", 0.0, 1.0)
    seconds = {"step": 1.0, "data": data_s, "forward": forward_s, "queued": queued_s}
    seconds["running"] = forward_s
    seconds["backward"] = 1.0 - ready_s
    return TraceRecord(number, 1, 1, seconds, None, (step, *spans))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ((0.3, 0.2, 0.0), "waits 200.0 ms longer for its data"),
        ((0.1, 0.4, 0.0), "computes 200.0 ms longer in its forward"),
        # Whichever of its parts became longer.
        (
            (0.2, 0.3, 0.18),
            "waits 180.0 ms longer for a processor, which something else uses",
        ),
    ],
)
def test_the_late_rank_is_named_with_what_makes_it_late(
    odd: tuple[float, float, float], why: str
) -> None:
    traces = [rank(number, 0.1, 0.2, 0.0) for number in range(3)]
    step = scaling.breakdown([*traces, rank(3, *odd)])
    assert (step.slowest, round(step.late, 6)) == (3, 0.2)
    assert step.late_for.startswith(why)
    small = step._replace(seconds=0.5, waiting=0.0, backward=0.0)
    large = step._replace(backward=0.5)
    texts = [change.text for change in scaling.changes(small, large, ())]
    assert any(f"rank 3 is 200.0 ms later than the others, and {why}" in text for text in texts)


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
    large = scaling.StepTimes(2.0, backward=2.0, link=link)
    (change,) = scaling.changes(scaling.StepTimes(1.0, backward=1.0), large, ())
    assert change.text.endswith(f"(--strategy=recommended); {link}")


def test_a_rank_that_is_late_for_several_things_has_no_cause() -> None:
    traces = [rank(number, 0.1, 0.2, 0.0) for number in range(3)]
    step = scaling.breakdown([*traces, rank(3, 0.2, 0.3, 0.05)])
    assert (step.slowest, step.late_for) == (3, "")


def trained(number: int, *parts: tuple[str, float], steps: int = 10) -> TraceRecord:
    """Return the profile of a rank whose steps have PARTS, one after the other; "" is no part."""
    length = sum(seconds for _, seconds in parts)
    spans = []
    for step in range(steps):
        at = step * length
        spans.append(SpanRecord(f"step {step + 1}", "step", "training", at, length))
        for kind, seconds in parts:
            if kind:
                spans.append(SpanRecord(kind, kind, "training", at, seconds))
            at += seconds
    means = dict.fromkeys((kind for kind, _ in parts if kind), 0.0)
    for kind, seconds in parts:
        if kind:
            means[kind] += seconds
    return TraceRecord(number, 1, steps, {"step": length, **means}, None, tuple(spans))


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_rank_that_is_late_in_code_of_the_script_is_named(place: int) -> None:
    """Wherever its own code stands: before the data, the forward, the backward or the update."""

    def rank(number: int, gap: float) -> TraceRecord:
        parts = [("data", 0.1), ("forward", 0.2), ("backward", 0.7 - gap), ("update", 0.1)]
        parts.insert(place, ("", gap))
        return trained(number, *parts)

    step = scaling.breakdown([rank(0, 0.0), rank(1, 0.4)])
    assert (step.slowest, round(step.waiting, 2)) == (1, 0.4)
    assert step.late == pytest.approx(0.4)
    assert step.late_for.startswith("spends 400.0 ms longer in the script itself")
    small = scaling.StepTimes(0.7, data=0.1, forward=0.2, backward=0.3, update=0.1)
    changes = scaling.changes(small, step, ())
    assert [change.cause for change in changes] == ["waiting"]
    assert changes[0].share == pytest.approx(0.4 / 1.1)


def test_a_rank_that_is_late_in_its_backward_is_named_if_waits_are_recorded() -> None:
    def rank(number: int, computed: float) -> TraceRecord:
        traced = trained(number, ("forward", 0.2), ("backward", 0.7), ("", 0.1), steps=1)
        waited = 0.7 - computed
        wait = SpanRecord("wait for bucket 0", "wait", "training", 0.2 + computed, waited)
        seconds = {**traced.seconds, "backward": computed, "wait": waited, "running": computed}
        return traced._replace(seconds=seconds, spans=(*traced.spans, wait))

    step = scaling.breakdown([rank(0, 0.2), rank(1, 0.6)])
    assert (step.slowest, round(step.late, 3)) == (1, 0.4)
    assert step.late_for == "computes 400.0 ms longer in its backward"
    small = scaling.StepTimes(0.5, forward=0.2, backward=0.2)
    parts = scaling.lost(small, step)
    assert {cause: abs(round(seconds, 3)) for cause, seconds in parts.items()} == {
        "data": 0.0,
        "computation": 0.0,
        "waiting": 0.4,
        "communication": 0.1,
        "other": 0.0,
    }


@pytest.mark.parametrize("around", ["", "forward"])
def test_who_is_awaited_in_a_collective_of_the_script_or_a_layer_is_late(around: str) -> None:
    """The others wait there and not in the backward, so they seem to be as busy."""

    def rank(number: int, gap: float) -> TraceRecord:
        traced = trained(
            number,
            *(("", gap), ("collective", 0.5 - gap), ("forward", 0.2), ("backward", 0.2)),
        )
        if not around:
            return traced
        # A layer calls it.
        seconds = {**traced.seconds, "forward": 0.2 + gap, "running": gap}
        steps = [span for span in traced.spans if span.kind == "step"]
        layers = [SpanRecord(around, around, "training", step.begin, 0.7) for step in steps]
        spans = [*(span for span in traced.spans if span.kind != around), *layers]
        return traced._replace(seconds=seconds, spans=tuple(spans))

    step = scaling.breakdown([rank(0, 0.1), rank(1, 0.1), rank(2, 0.4)])
    assert (step.slowest, round(step.late, 3), round(step.waiting, 3)) == (2, 0.3, 0.3)
    place = "computes 300.0 ms longer in its forward" if around else "spends 300.0 ms longer in"
    assert step.late_for.startswith(place)
    small = scaling.StepTimes(0.5, forward=0.3 if around else 0.2, backward=0.2)
    parts = {cause: round(s, 3) for cause, s in scaling.lost(small, step).items() if abs(s) > 1e-6}
    assert parts == {"waiting": 0.3, "communication": 0.1}


def test_who_is_awaited_by_the_devices_of_the_others_is_late() -> None:
    """Their hosts wait where they read a loss, and not in the backward or the collectives."""

    def rank(number: int, gap: float) -> TraceRecord:
        parts = (("", gap), ("forward", 0.1), ("backward", 0.1), ("sync", 0.7 - gap))
        return trained(number, *parts)._replace(device="gpu", has_reducer=True)

    step = scaling.breakdown([rank(0, 0.0), rank(1, 0.5)])
    assert (step.slowest, round(step.late, 3), round(step.waiting, 3)) == (1, 0.5, 0.5)
    small = scaling.StepTimes(0.3, forward=0.1, backward=0.1, sync=0.1)
    parts = {cause: round(s, 3) for cause, s in scaling.lost(small, step).items() if abs(s) > 1e-6}
    assert parts == {"waiting": 0.5, "communication": 0.1}
    sizes = [scaling.JobSize(number, ()) for number in (1, 2)]
    runs = {
        size: [scaling.ScaledRun(times)] for size, times in zip(sizes, (small, step), strict=True)
    }
    assert [text.partition(",")[0] for text in scaling._remarks(runs, ())] == ["On a gpu"]


def test_stages_of_a_pipeline_are_compared_as_a_whole() -> None:
    """They send and receive in different places, and their backwards wait for nobody."""
    first = trained(0, ("forward", 0.2), ("collective", 0.5), ("backward", 0.3))
    second = trained(
        *(1, ("collective", 0.1), ("forward", 0.4), ("backward", 0.45), ("collective", 0.05))
    )
    traces = [trace._replace(has_reducer=False) for trace in (first, second)]
    step = scaling.breakdown(traces)
    assert (step.slowest, round(step.late, 3), round(step.waiting, 3)) == (1, 0.35, 0.35)
    parts = scaling.lost(scaling.StepTimes(0.6, forward=0.2, backward=0.3), step)
    assert round(parts["communication"], 3) == 0.15
    (change,) = (
        change
        for change in scaling.changes(scaling.StepTimes(0.5, forward=0.2, backward=0.3), step, ())
        if change.cause == "communication"
    )
    assert change.words == ()
    assert change.text == (
        "collectives that the script or its layers call take 150.0 ms: call fewer and larger ones; "
        "in a hybrid job, lower the degrees of mp, sep or pp"
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"running": 0.2}, "computes 200.0 ms longer in its forward"),
        # Beside other programs it gets less of its processor.
        ({"running": 0.11, "queued": 0.09}, "computes 200.0 ms longer in its forward"),
        (
            {},
            "waits 200.0 ms longer in its forward, without computing (a lock, a file, a device)",
        ),
        (
            {"threads": 0.9, "queued": 0.2},
            "waits for Python's lock (GIL): its other threads compute for 900.0 ms of a step",
        ),
    ],
)
def test_what_computes_and_what_waits_are_told_apart(more: dict[str, float], why: str) -> None:
    known = {"running": 0.1, "threads": 0.0}
    traces = [rank(number, 0.1, 0.2, 0.0) for number in range(3)]
    traces = [trace._replace(seconds={**trace.seconds, **known}) for trace in traces]
    late = rank(3, 0.1, 0.4, 0.0)
    seconds = {**late.seconds, **known}
    for kind, seconds_of_it in more.items():
        seconds[kind] += seconds_of_it
    step = scaling.breakdown([*traces, late._replace(seconds=seconds, thread="reader")])
    assert step.slowest == 3
    assert step.late_for.startswith(why)
    assert step.late_for.endswith(" (mostly reader)") == ("threads" in more)


def jittered(number: int, gaps: list[float]) -> TraceRecord:
    """Return a profile with a step for each of GAPS, spent before the forward."""
    spans, at = [], 0.0
    for gap in gaps:
        for kind, begin, length in (
            ("step", at, 1.0),
            ("forward", at + gap, 0.2),
            ("backward", at + gap + 0.2, 0.8 - gap),
        ):
            spans.append(SpanRecord(kind, kind, "training", begin, length))
        at += 1.0
    mean = sum(gaps) / len(gaps)
    seconds = {"step": 1.0, "forward": 0.2, "backward": 0.8 - mean}
    return TraceRecord(number, 1, len(gaps), seconds, None, tuple(spans))


@pytest.mark.parametrize(
    ("gaps", "slowest"),
    [
        # By chance; in each step; in one of ten, as with an evaluation.
        ([0.0, 0.1, 0.3, 0.0, 0.2, 0.0, 0.1, 0.3, 0.1, 0.1], None),
        ([0.19, 0.2, 0.21, 0.19, 0.2, 0.18, 0.2, 0.21, 0.19, 0.2], 1),
        ([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 2.6], 1),
    ],
)
def test_a_rank_that_is_late_by_chance_is_not_named(gaps: list[float], slowest: int | None) -> None:
    others = [jittered(0, [0.2, 0.0, 0.1, 0.1, 0.0, 0.1, 0.0, 0.1, 0.0, 0.2])]
    step = scaling.breakdown([*others, jittered(1, gaps)])
    assert step.slowest == slowest
    assert step.waiting > 0.03


def test_no_change_saves_more_than_what_scaling_loses() -> None:
    """What rank 0 alone does with one rank, too, the others wait for: the step is hardly longer."""
    small = scaling.StepTimes(1.0, forward=0.2, backward=0.3)
    large = scaling.StepTimes(1.1, forward=0.2, backward=0.9, waiting=0.5)
    large = large._replace(slowest=0, late=0.5)
    for cause, share in (("waiting", 0.1 / 1.1), ("communication", 0.1 / 1.1)):
        (change,) = (row for row in scaling.changes(small, large, ()) if row.cause == cause)
        assert change.share == pytest.approx(share)
    assert scaling.changes(small._replace(seconds=1.2), large, ()) == []


def test_code_of_the_script_that_waits_for_a_processor_is_told_apart() -> None:
    """Computing outside of a layer, as prints and checkpoints do not."""
    small = scaling.StepTimes(1.0, forward=0.5, backward=0.5)
    for queued, cause in ((0.8, "ranks share processors"), (0.1, "the script itself: prints")):
        large = small._replace(seconds=2.0, queued_mean=queued, queued_rank=1, queued=queued)
        (change,) = scaling.changes(small, large, ())
        assert (change.cause, bool(change.words)) == ("other", queued > 0.5)
        assert change.text.startswith(cause)


@pytest.mark.parametrize(
    ("small", "why"),
    [
        (scaling.StepTimes(2.0), "see the processors and what else runs on them"),
        (
            scaling.StepTimes(2.0, queued_rank=0, queued=1.5),
            "rank 0 waits 1500.0 ms of a step for a processor",
        ),
    ],
)
def test_more_than_all_speed_is_explained(small: scaling.StepTimes, why: str) -> None:
    sizes = [scaling.JobSize(number, ()) for number in (1, 2, 4)]
    steps = (small, scaling.StepTimes(1.0), scaling.StepTimes(1.9))
    runs = {size: [scaling.ScaledRun(step)] * 2 for size, step in zip(sizes, steps, strict=True)}
    (text,) = scaling._remarks(runs, ())
    assert text == (
        f"A step with 1 takes longer than with 2, so it is slowed down ({why}), and efficiencies "
        "mean little."
    )
    assert list(scaling._remarks({**runs, sizes[0]: runs[sizes[1]]}, ())) == []


def test_ranks_that_compute_longer_are_told_who_waits_for_a_processor() -> None:
    step = scaling.breakdown([rank(0, 0.1, 0.2, 0.05), rank(1, 0.1, 0.2, 0.3)])
    assert (step.queued_rank, step.queued) == (1, 0.3)
    small = step._replace(seconds=0.5, forward=0.1)
    (text,) = (c.text for c in scaling.changes(small, step, ()) if c.cause == "computation")
    assert text.endswith("(--bind=cores); rank 1 waits 300.0 ms of a step for a processor")
    quiet = scaling.breakdown([rank(0, 0.1, 0.2, 0.05), rank(1, 0.1, 0.2, 0.06)])
    assert quiet.queued_rank is None


def test_what_the_launch_has_measured_of_the_late_rank_is_its_cause() -> None:
    traces = [rank(number, 0.1, 0.2, 0.0) for number in range(3)]
    step = scaling.breakdown([*traces, rank(3, 0.3, 0.2, 0.0)])
    step = step._replace(held_by="GPU 3 of rank 3 runs at 1200 MHz, the others at 1980.")
    small = step._replace(seconds=0.5, waiting=0.0, backward=0.0)
    changes = scaling.changes(small, step._replace(backward=0.5), ())
    (text,) = (change.text for change in changes if change.cause == "waiting")
    assert text.endswith(
        "rank 3 is 200.0 ms later than the others: GPU 3 of rank 3 runs at 1200 MHz, the others at "
        "1980"
    )


def test_a_long_error_stands_below_the_table() -> None:
    fault = "it exited with 1: " + "x" * 200
    sizes = [scaling.JobSize(number, ()) for number in (1, 2)]
    run = scaling.ScaledRun(scaling.StepTimes(1.0))
    shown = scaling.table({sizes[0]: [run], sizes[1]: [scaling.ScaledRun(fault=fault)]}, 0)
    *figures, last = shown.split("\n")
    assert last == f"2 failed: {fault}"
    assert max(map(len, figures)) < 100
