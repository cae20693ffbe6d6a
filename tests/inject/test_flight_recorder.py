"""The launcher reads the collectives that a rank has recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from fleetrun.inject import border, flight_recorder
from fleetrun.inject.flight_recorder import FlightRecorder
from fleetrun.rundir import flightfile
from fleetrun.rundir.flightfile import (
    ASYNCHRONOUS,
    BLOCKING,
    RAISED,
    CollectiveChannel,
    FlightRecord,
)


class Tensor:
    """Something with a dtype and a shape."""

    dtype = "paddle.float32"

    def __init__(self, *shape: int) -> None:
        self.shape = list(shape)

    def element_size(self) -> int:
        """Return the bytes of a number."""
        return 4


class Task:
    """A work handle of a device; the test decides when it is done."""

    is_done = False

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self.is_done


def process_group(backend: str = "GLOO") -> Any:
    """Return a ProcessGroup of a new class, which the caller records."""

    class ProcessGroup:
        """Does nothing; it raises for a barrier."""

        def name(self) -> str:
            return backend

        def all_reduce(self, _tensor: Tensor, _op: str, _sync: bool) -> Task:
            return Task()

        def broadcast_on_calc_stream(self, _tensor: Tensor, _root: int) -> Task:
            return Task()

        def recv(self, _tensor: Tensor, _source: int) -> Task:
            return Task()

        def barrier(self) -> None:
            raise RuntimeError("peer lost")

    return ProcessGroup()


def recorder(folder: Path, *groups: Any, ranks: tuple[int, ...] = (4, 6)) -> FlightRecorder:
    made = FlightRecorder(str(folder / "ring"))
    for group in groups:
        flight_recorder._patch_methods(made, SimpleNamespace(ProcessGroup=type(group)))
        made.add(group, ranks)
    return made


def seen(folder: Path) -> FlightRecord:
    records = flightfile.read(str(folder / "ring"), 0)
    assert records is not None
    return records


def test_the_writer_and_the_reader_have_one_layout() -> None:
    names = "MAGIC HEADER_BYTES TABLE_BYTES SLOT_BYTES SLOTS FAILED BLOCKING ASYNCHRONOUS RAISED"
    for name in names.split():
        assert getattr(flight_recorder, name) == getattr(flightfile, name), name
    for name in ("HEADER", "SLOT"):
        assert getattr(flight_recorder, name).format == getattr(flightfile, name).format, name
    assert flightfile.HEADS.size == flight_recorder.CHANNELS * flight_recorder.HEAD.size
    assert flightfile.HEADER.size <= flightfile.HEADER_BYTES


def test_each_collective_is_there_while_it_runs_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", "6")
    group = process_group()
    recorder(tmp_path, group)
    group.all_reduce(Tensor(4, 2), "ReduceOp.SUM", True)
    line = sys._getframe().f_lineno - 1
    group.all_reduce(Tensor(), "ReduceOp.MAX", True)
    group.broadcast_on_calc_stream(Tensor(7), 1)
    group.recv(Tensor(3), 0)
    with pytest.raises(RuntimeError, match="peer lost"):
        group.barrier()
    first, highest, sent, received, raised = seen(tmp_path).collectives
    world = CollectiveChannel((4, 6))
    assert (first.channel, first.sequence, first.operation) == (world, 1, "all_reduce")
    assert (first.tensor, first.nbytes, first.state) == ("float32 [4, 2]", 32, BLOCKING)
    assert first.done_at is not None
    assert 0 <= first.done_at - first.issued_at < 60
    assert first.site == (__file__[-100:], line, sys._getframe().f_code.co_name[:40])
    assert (highest.operation, highest.shape, highest.nbytes) == ("all_reduce", (), 4)
    assert (sent.operation, sent.sequence, sent.root) == ("broadcast", 3, 6)
    assert received.channel == CollectiveChannel((4, 6), 1, "recv", 4, 6)
    assert (received.sequence, received.root) == (1, -1)
    assert (raised.state, raised.is_open, raised.done_at) == (RAISED, False, None)
    assert seen(tmp_path).last == {world: 4, received.channel: 1}
    assert (seen(tmp_path).rank, seen(tmp_path).pid) == (6, os.getpid())


def test_a_rank_that_calls_nothing_more_still_records_what_its_device_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "_PERIOD_S", 0.001)
    group, other = process_group("XCCL"), process_group("XCCL")
    recorder(tmp_path, group, other)
    other.all_reduce(Tensor(1), "ReduceOp.SUM", False)
    first, second = (group.all_reduce(Tensor(1), "ReduceOp.SUM", False) for _ in range(2))
    assert {collective.state for collective in seen(tmp_path).collectives} == {ASYNCHRONOUS}
    assert seen(tmp_path).collectives[0].is_open
    second.is_done = True
    until(lambda: not seen(tmp_path).collectives[2].is_open)
    # A device runs the collectives of one group in order.
    assert [collective.is_open for collective in seen(tmp_path).collectives] == [True, False, False]
    assert not first.is_done
    called_at = seen(tmp_path).collectives[2].issued_at
    until(lambda: seen(tmp_path).settled_at > called_at)


def test_the_ring_has_the_newest_and_the_counts_of_all(tmp_path: Path) -> None:
    group, other = process_group(), process_group()
    # Two groups of the same ranks are two.
    recorder(tmp_path, other, group)
    more = flight_recorder.SLOTS + 10
    for _ in range(more):
        group.all_reduce(Tensor(1), "ReduceOp.SUM", True)
    recorded = seen(tmp_path)
    assert [collective.sequence for collective in recorded.collectives] == [*range(11, more + 1)]
    assert recorded.last == {recorded.collectives[0].channel: more}


def test_a_failure_is_one_remark_and_the_rank_is_not_taken_for_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remarks: list[str] = []
    monkeypatch.setattr(border, "_remark_callbacks", [remarks.append])
    monkeypatch.setattr(border, "_remarked", set())
    group = process_group()
    recorder(tmp_path, group)
    group.all_reduce(Tensor(1), "ReduceOp.SUM", True)
    assert group.all_reduce(object(), "ReduceOp.SUM", True) is not None
    group.recv(object(), 1)
    group.all_reduce(Tensor(1), "ReduceOp.SUM", True)
    assert len(remarks) == 1
    assert "the flight recorder has failed" in remarks[0]
    assert seen(tmp_path).has_failed


def test_a_record_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parents[level]) for level in range(3)]!r}
from pathlib import Path
import test_flight_recorder as ours
group = ours.process_group()
made = ours.recorder(Path({str(tmp_path)!r}), group)
group.all_reduce(ours.Tensor(4), "ReduceOp.SUM", True)
type(group).wait = lambda group: os.kill(os.getpid(), 9)
type(group).barrier = type(group).wait
ours.flight_recorder._patch_methods(made, ours.SimpleNamespace(ProcessGroup=type(group)))
group.barrier()
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGKILL
    first, last = seen(tmp_path).collectives
    assert (first.is_open, last.operation, last.is_open) == (False, "barrier", True)


@pytest.mark.parametrize(("backend", "state"), [("GLOO", BLOCKING), ("NCCL", ASYNCHRONOUS)])
def test_a_backward_of_paddles_own_reducer_is_seen_from_its_begin_to_its_end(
    tmp_path: Path, backend: str, state: int
) -> None:
    group = process_group(backend)

    class EagerReducer:
        """Sums gradients outside of Python."""

        def __init__(self, *_: object) -> None:
            pass

        def prepare_for_backward(self, _outputs: object) -> None:
            pass

    def run_backward(fails: bool) -> None:
        begun = [call.state for call in seen(tmp_path).collectives if call.is_open]
        assert begun in ([], [BLOCKING], [BLOCKING] * 2)
        if fails:
            raise RuntimeError("peer lost")

    core: Any = SimpleNamespace(
        ProcessGroup=type(group),
        EagerReducer=EagerReducer,
        eager=SimpleNamespace(run_backward=run_backward),
    )
    made = FlightRecorder(str(tmp_path / "ring"))
    flight_recorder._patch_methods(made, core)
    made.add(group, (4, 6))
    reducer = EagerReducer([Tensor(2, 3), Tensor(3)], [], [], group, [], False)
    # A backward without a forward does not belong to DataParallel.
    core.eager.run_backward(False)
    reducer.prepare_for_backward([])
    core.eager.run_backward(False)
    reducer.prepare_for_backward([])
    with pytest.raises(RuntimeError, match="peer lost"):
        core.eager.run_backward(True)
    other = EagerReducer([Tensor(5)], [], [], group, [], False)
    for forward in (other, reducer, other):
        forward.prepare_for_backward([])
    core.eager.run_backward(False)
    first, second, *both = seen(tmp_path).collectives
    # It counts among the calls of its group.
    assert first.channel == second.channel == CollectiveChannel((4, 6))
    assert (first.operation, first.sequence, first.is_open) == ("backward", 1, False)
    assert (second.sequence, second.state) == (2, RAISED)
    assert [call.tensor for call in (first, *both)] == ["float32 [9]", "float32 [5]", "float32 [9]"]
    assert {call.state for call in (first, *both)} == {state}
