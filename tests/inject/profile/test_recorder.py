"""A profile: the recorded steps, the hidden time, and a file that cannot be written."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.inject.profile import bucket_spans, recorder
from fleetrun.inject.profile.recorder import COLLECTIVE, FLIGHT, SYNC, WAIT, Recorder, Span
from fleetrun.records import tracefile

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MS = 1_000_000
INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted), max_size=8)


def spans(kind: str, intervals: list[list[int]]) -> list[Span]:
    return [Span(kind, 0, begin, end, {}, kind) for begin, end in intervals]


def make(path: Path, first: int, last: int, steps: int) -> None:
    """Make STEPS steps with one backward each, recording FIRST to LAST."""
    made = Recorder(str(path), first, last, rank=3)
    for _ in range(steps):
        begin = recorder.now()
        made.add("backward", 0, begin)
        made.end_step()
    made.write()


def test_the_steps_that_are_asked_for_are_written(tmp_path: Path) -> None:
    make(tmp_path / "trace", 3, 5, 9)
    trace = tracefile.read(str(tmp_path / "trace"))
    assert trace is not None
    assert (trace.rank, trace.first_step, trace.steps) == (3, 3, 3)
    assert [span.name for span in trace.spans if span.kind == "step"] == [
        "step 3",
        "step 4",
        "step 5",
    ]
    assert sum(span.kind == "backward" for span in trace.spans) == 3
    assert 0.0 <= trace.seconds["queued"] < 10.0
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600


def test_each_step_has_the_run_of_the_program_that_it_ends_in(tmp_path: Path) -> None:
    made = Recorder(str(tmp_path / "trace"), 2, 3, rank=0)
    for _ in range(4):
        begin = recorder.now()
        made.begin_program()
        # The update is part of the program.
        made.end_step()
        made.end_program(begin)
    recorded = tracefile.read(str(tmp_path / "trace"))
    assert recorded is not None
    assert [span.kind for span in recorded.spans] == ["step", "step", "run", "run"]
    assert recorded.seconds["run"] <= recorded.seconds["step"]


def test_what_there_is_when_the_script_ends_early_is_written(tmp_path: Path) -> None:
    make(tmp_path / "some", 3, 5, 4)
    make(tmp_path / "none", 3, 5, 2)
    trace = tracefile.read(str(tmp_path / "some"))
    assert trace is not None
    assert trace.steps == 2
    assert not (tmp_path / "none").exists()


def test_an_allreduce_on_a_device_is_recorded_until_it_was_waited_for(tmp_path: Path) -> None:
    made = Recorder(str(tmp_path / "trace"), 1, 1, rank=0)
    calls: list[object] = []
    work = SimpleNamespace(wait=lambda: calls.append("waited"))

    def submit(_stages: object, _tensor: object, root: int | None) -> object:
        calls.append(root)
        return work

    tensor = SimpleNamespace(size=3, element_size=lambda: 4)
    flown = bucket_spans._submit(made, submit, None, tensor, 2)
    assert made.spans == []
    flown.wait()
    assert calls == [2, "waited"]
    assert [(span.kind, span.details) for span in made.spans] == [(FLIGHT, {"bytes": 12})]


def test_a_file_that_cannot_be_written_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "none" / "trace", 1, 1, 2)
    assert "the profile cannot be written" in capsys.readouterr().err


@given(INTERVALS, INTERVALS)
def test_hidden_is_the_share_of_flights_in_which_nobody_waits(
    flights: list[list[int]], waits: list[list[int]]
) -> None:
    summary = recorder.summary([(0, 50)], [*spans(FLIGHT, flights), *spans(WAIT, waits)])
    flown = [at for begin, end in flights for at in range(begin, end)]
    waited = {at for begin, end in waits for at in range(begin, end)}
    if not flown:
        assert summary["hidden"] is None
    else:
        assert summary["hidden"] == sum(at not in waited for at in flown) / len(flown)


def test_waiting_is_no_part_of_the_backward_around_it() -> None:
    described = recorder.summary(
        [(0, 100 * MS)],
        [
            *spans("backward", [[0, 80 * MS]]),
            *spans(WAIT, [[50 * MS, 60 * MS], [90 * MS, 95 * MS]]),
        ],
    )
    assert {kind: round(s * 1e3) for kind, s in described["seconds"].items()} == {
        "backward": 70,
        "step": 100,
        "wait": 15,
    }


def test_a_collective_is_no_part_of_what_is_around_it() -> None:
    described = recorder.summary(
        [(0, 100 * MS)],
        [
            *spans("forward", [[0, 40 * MS]]),
            *spans("backward", [[40 * MS, 80 * MS]]),
            *spans(WAIT, [[50 * MS, 60 * MS]]),
            # In a layer, for a bucket that is waited for, and in the script.
            *spans(COLLECTIVE, [[10 * MS, 15 * MS], [55 * MS, 60 * MS], [90 * MS, 93 * MS]]),
            # The barrier of a device waits for it.
            *spans(SYNC, [[20 * MS, 22 * MS], [91 * MS, 95 * MS]]),
        ],
    )
    assert {kind: round(s * 1e3) for kind, s in described["seconds"].items()} == {
        "backward": 30,
        "collective": 8,
        "forward": 33,
        "step": 100,
        "sync": 4,
        "wait": 10,
    }


def test_collectives_of_other_threads_are_not_waited_for(tmp_path: Path) -> None:
    made = Recorder(str(tmp_path / "trace"), 1, 1, rank=0)
    made.add_collective("barrier", recorder.now())
    other = threading.Thread(target=made.add_collective, args=("all_reduce", recorder.now()))
    other.start()
    other.join()
    assert [(span.name, span.kind) for span in made.spans] == [("barrier", COLLECTIVE)]


def test_the_first_step_does_not_begin_with_the_collectives_that_make_a_model(
    tmp_path: Path,
) -> None:
    made = Recorder(str(tmp_path / "trace"), 1, 1, rank=0)
    made.add_collective("broadcast", recorder.now())
    begin = recorder.now()
    made.add("forward", 0, begin)
    made.end_step()
    trace = tracefile.read(str(tmp_path / "trace"))
    assert trace is not None
    assert [span.kind for span in trace.spans] == ["step", "forward"]


def test_the_use_of_processors_by_threads_is_recorded(tmp_path: Path) -> None:
    made = Recorder(str(tmp_path / "trace"), 1, 1, rank=0)
    goes_on, worked, ends = (threading.Event() for _ in range(3))

    def work() -> None:
        goes_on.wait()
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        worked.set()
        ends.wait()

    thread = threading.Thread(target=work, name="reader")
    thread.start()
    made.add("forward", 0, recorder.now())
    goes_on.set()
    worked.wait()
    made.end_step()
    made.write()
    ends.set()
    thread.join()
    trace = tracefile.read(str(tmp_path / "trace"))
    assert trace is not None
    assert trace.thread == "reader"
    assert trace.seconds["threads"] >= 0.05
    assert 0.0 <= trace.seconds["running"] < trace.seconds["threads"]
    assert not trace.has_reducer


def test_a_broken_trace_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for text in ("", "{}", '{"schema": 1}', '{"schema": 1, "otherData": {"rank": 0}}'):
        path.write_text(text)
        assert tracefile.read(str(path)) is None
    whole = {
        "schema": 1,
        "otherData": {"rank": 0, "first_step": 1, "summary": {"steps": 1, "seconds": {"a": "b"}}},
        "traceEvents": [{"ph": "X", "ts": 1, "dur": None, "tid": []}, 7],
    }
    path.write_text(json.dumps(whole))
    assert tracefile.read(str(path)) == tracefile.TraceRecord(0, 1, 1, {}, None, ())
