"""A profile of a real training is complete, and does not change the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import pytest
from training import PYTHONS, RUN, SITE, STATIC, run, train

from fleetrun.commands.tune import losses
from fleetrun.records import tracefile

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train
USE = {"running", "queued", "threads"}


def recorded(folder: Path) -> list[tracefile.TraceRecord]:
    """Return the traces of both ranks."""
    traces = [tracefile.read(str(folder / f"trace.{rank}.json")) for rank in range(2)]
    assert None not in traces
    return [trace for trace in traces if trace is not None]


@pytest.mark.parametrize("version", PYTHONS)
def test_each_bucket_is_sent_flies_and_is_waited_for(version: str, tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    asked = {"fuse_grad_size_in_num": 2}
    first, second = train(PYTHONS[version], "profiled.py", folder, asked, profile="3-5")
    assert first == second
    for trace in recorded(folder):
        assert trace.steps == 3
        # The use of processors is a total, without spans; in some steps our checks communicate.
        kinds = trace.seconds.keys() - USE - {"collective"}
        counts = {kind: sum(span.kind == kind for span in trace.spans) for kind in kinds}
        # Four layers have eight gradients. Each step loads its batch first.
        assert counts == {
            **dict.fromkeys(("step", "forward", "backward", "update", "data"), 3),
            **dict.fromkeys(("send", "flight", "wait"), 12),
        }
        assert {span.track for span in trace.spans if span.kind == "flight"} == {
            f"bucket {number}" for number in range(4)
        }
        assert trace.hidden is not None
        assert 0 <= trace.hidden <= 1


@pytest.mark.parametrize("version", ["3.3.1", pytest.param("2.6.2", marks=pytest.mark.long)])
def test_without_a_strategy_the_parts_of_a_step_are_told(version: str, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    train(PYTHONS[version], "profiled.py", folder, None, profile="1-2")
    for trace in recorded(folder):
        assert trace.steps == 2
        assert set(trace.seconds) == {"step", "forward", "backward", "update", "data"} | USE
        assert trace.has_reducer
        assert trace.hidden is None


@pytest.mark.parametrize("version", ["3.3.1", pytest.param("2.6.2", marks=pytest.mark.long)])
@pytest.mark.parametrize("asked", [None, {"fuse_grad_size_in_num": 2}])
def test_collectives_that_the_script_calls_are_waits(
    version: str, asked: dict[str, Any] | None, tmp_path: Path
) -> None:
    """With our reducer, too, whose own ones are waits for buckets."""
    train(PYTHONS[version], "meeting.py", tmp_path / "run", asked, profile="3-5")
    first, second = recorded(tmp_path / "run")
    for trace in (first, second):
        names = [span.name for span in trace.spans if span.kind == "collective"]
        # In some steps our checks communicate, too.
        assert names.count("barrier") == 3
        assert names.count("all_reduce") == 3 or (asked and names.count("all_reduce") > 3)
        assert (trace.device, "sync" in trace.seconds) == ("cpu", False)
    assert first.seconds["collective"] - second.seconds["collective"] > 0.04
    step = losses.breakdown([first, second])
    assert step.slowest == 1
    assert step.late > 0.04
    assert step.late_for.startswith("spends ")


@pytest.mark.parametrize("version", ["3.3.1", pytest.param("2.6.2", marks=pytest.mark.long)])
def test_pythons_code_within_a_backward_is_told_from_its_communication(
    version: str, tmp_path: Path
) -> None:
    train(PYTHONS[version], "hooked.py", tmp_path / "run", None, profile="3-5")
    first, second = recorded(tmp_path / "run")
    for trace in (first, second):
        # Only the second backward of a step averages gradients.
        busy = [span.busy for span in trace.spans if span.kind == "backward"]
        assert [seconds is None for seconds in busy] == [True, False] * 3
        assert trace.has_reducer
    step = losses.breakdown([first, second])
    assert step.slowest == 1
    assert step.late > 0.06


@pytest.mark.parametrize("version", ["3.3.1", pytest.param("2.6.2", marks=pytest.mark.long)])
def test_what_a_rank_waits_for_on_its_device_is_seen_where_the_script_waits(
    version: str, tmp_path: Path
) -> None:
    with devices.on("npu"):
        train(PYTHONS[version], "meeting.py", tmp_path / "run", None, profile="3-5")
    first, second = recorded(tmp_path / "run")
    for trace in (first, second):
        assert trace.device == "npu"
        assert sum(span.kind == "sync" for span in trace.spans) == 3
    step = losses.breakdown([first, second])
    assert step.slowest == 1
    assert step.late > 0.04
    assert step.late_for.startswith("spends ")


@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("more", [{}, {"FLEETRUN_STOP_AFTER": "9"}], ids=["alone", "in a trial"])
def test_each_run_of_a_static_program_is_one_step(
    version: str, more: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STATIC + 4 * RUN)
    trace = tmp_path / "trace"
    more = {"PYTHONPATH": str(SITE), "FLEETRUN_PROFILE": f"1-9:{trace}", **more}
    done = run(PYTHONS[version], ["-W", "ignore", "train.py"], tmp_path, **more)
    assert done.returncode == 0, done.stdout
    read = tracefile.read(str(trace))
    assert read is not None
    assert read.steps == 4
