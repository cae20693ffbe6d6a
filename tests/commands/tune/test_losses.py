"""Where the time of a step goes: the rank that the others wait for, why, and what to change."""

from __future__ import annotations

import pytest

from fleetrun.commands.tune import losses
from fleetrun.records.tracefile import SpanRecord, TraceRecord


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
    step = losses.breakdown([*traces, rank(3, *odd)])
    assert (step.slowest, round(step.late, 6)) == (3, 0.2)
    assert step.late_for.startswith(why)
    small = step._replace(seconds=0.5, waiting=0.0, backward=0.0)
    large = step._replace(backward=0.5)
    texts = [change.text for change in losses.changes(small, large, ())]
    assert any(f"rank 3 is 200.0 ms later than the others, and {why}" in text for text in texts)
    # If all load data as slowly, the others prefetch while they wait.
    for_data = [text.startswith("give the DataLoader more processes") for text in texts]
    assert any(for_data) == why.endswith("for its data")


def test_a_rank_that_computes_longer_on_a_busy_host_waits_as_often_as_the_others() -> None:
    """As measured at a load of 36: it computes 45 ms in its forward, the others 20."""

    def crowded(number: int, forward: float, running: float, queued: float) -> TraceRecord:
        traced = rank(number, 0.0, forward, queued)
        return traced._replace(seconds={**traced.seconds, "running": running})

    others = [crowded(number, 0.16, 0.025, 0.135) for number in range(2)]
    step = losses.breakdown([*others, crowded(2, 0.37, 0.05, 0.333)])
    assert step.slowest == 2
    assert step.late_for == "computes 210.0 ms longer in its forward"
    # The same wait without anything to compute.
    step = losses.breakdown([*others, crowded(2, 0.37, 0.025, 0.333)])
    assert step.late_for.startswith("waits 198.0 ms longer for a processor")


def test_what_takes_longer_than_the_rest_of_a_step_cannot_be_hidden_behind_it() -> None:
    """As measured between hosts: 8 MB of gradients on a link that carries 7.8 MiB a second."""
    small = losses.StepTimes(0.07, forward=0.03, backward=0.03)
    for backward, is_told in ((1.03, True), (0.08, False)):
        large = small._replace(seconds=small.seconds + backward - 0.03, backward=backward)
        (change,) = losses.changes(small, large, ())
        assert change.words == ("--strategy=recommended",)
        assert ("hides at most 70.0 ms" in change.text) == is_told


def test_a_rank_that_is_late_for_several_things_has_no_cause() -> None:
    traces = [rank(number, 0.1, 0.2, 0.0) for number in range(3)]
    step = losses.breakdown([*traces, rank(3, 0.2, 0.3, 0.05)])
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

    step = losses.breakdown([rank(0, 0.0), rank(1, 0.4)])
    assert (step.slowest, round(step.waiting, 2)) == (1, 0.4)
    assert step.late == pytest.approx(0.4)
    assert step.late_for.startswith("spends 400.0 ms longer in the script itself")
    small = losses.StepTimes(0.7, data=0.1, forward=0.2, backward=0.3, update=0.1)
    changes = losses.changes(small, step, ())
    assert [change.cause for change in changes] == ["waiting"]
    assert changes[0].share == pytest.approx(0.4 / 1.1)


def test_a_rank_that_is_late_in_its_backward_is_named_if_waits_are_recorded() -> None:
    def rank(number: int, computed: float) -> TraceRecord:
        traced = trained(number, ("forward", 0.2), ("backward", 0.7), ("", 0.1), steps=1)
        waited = 0.7 - computed
        wait = SpanRecord("wait for bucket 0", "wait", "training", 0.2 + computed, waited)
        seconds = {**traced.seconds, "backward": computed, "wait": waited, "running": computed}
        return traced._replace(seconds=seconds, spans=(*traced.spans, wait))

    step = losses.breakdown([rank(0, 0.2), rank(1, 0.6)])
    assert (step.slowest, round(step.late, 3)) == (1, 0.4)
    assert step.late_for == "computes 400.0 ms longer in its backward"
    small = losses.StepTimes(0.5, forward=0.2, backward=0.2)
    parts = losses.lost(small, step)
    assert {cause: abs(round(seconds, 3)) for cause, seconds in parts.items()} == {
        "data": 0.0,
        "computation": 0.0,
        "waiting": 0.4,
        "communication": 0.1,
        "other": 0.0,
    }


def reduced(number: int, busy: float, tail: float = 0.0, host: int = 0) -> TraceRecord:
    """Return a profile whose backwards wait in a reducer of Paddle's for other ranks."""
    parts = (("", tail), ("forward", 0.2), ("backward", 0.7), ("", 0.1 - tail))
    traced = trained(number, *parts)
    spans = (span._replace(busy=busy) if span.kind == "backward" else span for span in traced.spans)
    return traced._replace(spans=tuple(spans), host=host)


@pytest.mark.parametrize(
    ("odd", "more", "why"),
    [
        (reduced(1, 0.6), {"running": 0.4}, "computes 400.0 ms longer in its backward"),
        (reduced(1, 0.6), {"threads": 0.4}, "waits for Python's lock (GIL)"),
        (
            reduced(1, 0.6),
            {},
            "waits 400.0 ms longer in its backward, without computing (a lock, Python's (GIL), ",
        ),
        # Python's lock was held as the backward returned.
        (reduced(1, 0.2, 0.1), {}, "waits 100.0 ms longer in its backward, without computing"),
    ],
)
def test_a_rank_that_is_late_in_its_backward_is_named_with_paddles_reducer(
    odd: TraceRecord, more: dict[str, float], why: str
) -> None:
    """Its communication is not recorded, and the backward is as long for all ranks."""
    odd = odd._replace(seconds={**odd.seconds, **more})
    step = losses.breakdown([reduced(0, 0.2), odd])
    assert step.slowest == 1
    assert step.late_for.startswith(why)
    assert step.waiting == pytest.approx(step.late)
    # The clocks of other hosts are other clocks.
    elsewhere = losses.breakdown([reduced(0, 0.2), reduced(1, 0.2, 0.1, host=1)])
    assert elsewhere.slowest is None
    assert elsewhere.late == pytest.approx(0.0)


def test_a_backward_that_accumulates_gradients_is_no_meeting() -> None:
    """Rank 0 is late before one of two backwards, rank 1 before the other, which alone reduces."""

    def rank(number: int, first: float, second: float) -> TraceRecord:
        traced = trained(
            number, ("forward", first), ("backward", 0.2), ("forward", second), ("backward", 0.4)
        )
        spans = list(traced.spans)
        spans[4::5] = [span._replace(busy=0.2) for span in spans[4::5]]
        return traced._replace(spans=tuple(spans))

    step = losses.breakdown([rank(0, 0.3, 0.1), rank(1, 0.1, 0.3)])
    assert step.slowest is None
    assert step.waiting == pytest.approx(0.0)


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

    step = losses.breakdown([rank(0, 0.1), rank(1, 0.1), rank(2, 0.4)])
    assert (step.slowest, round(step.late, 3), round(step.waiting, 3)) == (2, 0.3, 0.3)
    place = "computes 300.0 ms longer in its forward" if around else "spends 300.0 ms longer in"
    assert step.late_for.startswith(place)
    small = losses.StepTimes(0.5, forward=0.3 if around else 0.2, backward=0.2)
    parts = {cause: round(s, 3) for cause, s in losses.lost(small, step).items() if abs(s) > 1e-6}
    assert parts == {"waiting": 0.3, "communication": 0.1}


def test_who_is_awaited_by_the_devices_of_the_others_is_late() -> None:
    """Their hosts wait where they read a loss, and not in the backward or the collectives."""

    def rank(number: int, gap: float) -> TraceRecord:
        parts = (("", gap), ("forward", 0.1), ("backward", 0.1), ("sync", 0.7 - gap))
        return trained(number, *parts)._replace(device="gpu", has_reducer=True)

    step = losses.breakdown([rank(0, 0.0), rank(1, 0.5)])
    assert (step.slowest, round(step.late, 3), round(step.waiting, 3)) == (1, 0.5, 0.5)
    small = losses.StepTimes(0.3, forward=0.1, backward=0.1, sync=0.1)
    parts = {cause: round(s, 3) for cause, s in losses.lost(small, step).items() if abs(s) > 1e-6}
    assert parts == {"waiting": 0.5, "communication": 0.1}


def test_stages_of_a_pipeline_are_compared_as_a_whole() -> None:
    """They send and receive in different places, and their backwards wait for nobody."""
    first = trained(0, ("forward", 0.2), ("collective", 0.5), ("backward", 0.3))
    second = trained(
        *(1, ("collective", 0.1), ("forward", 0.4), ("backward", 0.45), ("collective", 0.05))
    )
    traces = [trace._replace(has_reducer=False) for trace in (first, second)]
    step = losses.breakdown(traces)
    assert (step.slowest, round(step.late, 3), round(step.waiting, 3)) == (1, 0.35, 0.35)
    parts = losses.lost(losses.StepTimes(0.6, forward=0.2, backward=0.3), step)
    assert round(parts["communication"], 3) == 0.15
    (change,) = (
        change
        for change in losses.changes(losses.StepTimes(0.5, forward=0.2, backward=0.3), step, ())
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
    step = losses.breakdown([*traces, late._replace(seconds=seconds, thread="reader")])
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
    step = losses.breakdown([*others, jittered(1, gaps)])
    assert step.slowest == slowest
    assert step.waiting > 0.03


def test_a_step_that_varies_has_an_error() -> None:
    trace = trained(0, ("forward", 0.5), ("backward", 0.5), steps=4)
    assert losses.breakdown([trace]).error == 0.0
    steps = [span for span in trace.spans if span.kind == "step"]
    longer = [*steps[:-1], steps[-1]._replace(seconds=3.0)]
    assert losses.breakdown([trace._replace(spans=tuple(longer))]).error == pytest.approx(0.5)


def test_no_change_saves_more_than_what_scaling_loses() -> None:
    """What rank 0 alone does with one rank, too, the others wait for: the step is hardly longer."""
    small = losses.StepTimes(1.0, forward=0.2, backward=0.3)
    large = losses.StepTimes(1.1, forward=0.2, backward=0.9, waiting=0.5)
    large = large._replace(slowest=0, late=0.5)
    for cause, share in (("waiting", 0.1 / 1.1), ("communication", 0.1 / 1.1)):
        (change,) = (row for row in losses.changes(small, large, ()) if row.cause == cause)
        assert change.share == pytest.approx(share)
    assert losses.changes(small._replace(seconds=1.2), large, ()) == []


def test_code_of_the_script_that_waits_for_a_processor_is_told_apart() -> None:
    """Computing outside of a layer, as prints and checkpoints do not."""
    small = losses.StepTimes(1.0, forward=0.5, backward=0.5)
    for queued, cause in ((0.8, "ranks share processors"), (0.1, "the script itself: prints")):
        large = small._replace(seconds=2.0, queued_mean=queued, queued_rank=1, queued=queued)
        (change,) = losses.changes(small, large, ())
        assert (change.cause, bool(change.words)) == ("other", queued > 0.5)
        assert change.text.startswith(cause)


def test_ranks_that_compute_longer_are_told_who_waits_for_a_processor() -> None:
    step = losses.breakdown([rank(0, 0.1, 0.2, 0.05), rank(1, 0.1, 0.2, 0.3)])
    assert (step.queued_rank, step.queued) == (1, 0.3)
    small = step._replace(seconds=0.5, forward=0.1)
    (text,) = (c.text for c in losses.changes(small, step, ()) if c.cause == "computation")
    assert text.endswith("(--bind=cores); rank 1 waits 300.0 ms of a step for a processor")
    quiet = losses.breakdown([rank(0, 0.1, 0.2, 0.05), rank(1, 0.1, 0.2, 0.06)])
    assert quiet.queued_rank is None


def test_what_the_launch_has_measured_of_the_late_rank_is_its_cause() -> None:
    traces = [rank(number, 0.1, 0.2, 0.0) for number in range(3)]
    step = losses.breakdown([*traces, rank(3, 0.3, 0.2, 0.0)])
    step = step._replace(held_by="GPU 3 of rank 3 runs at 1200 MHz, the others at 1980.")
    small = step._replace(seconds=0.5, waiting=0.0, backward=0.0)
    changes = losses.changes(small, step._replace(backward=0.5), ())
    (text,) = (change.text for change in changes if change.cause == "waiting")
    assert text.endswith(
        "rank 3 is 200.0 ms later than the others: GPU 3 of rank 3 runs at 1200 MHz, the others at "
        "1980"
    )
