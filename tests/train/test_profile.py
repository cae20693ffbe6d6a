"""A profile of a real training is complete, and does not change the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training import PYTHONS, train

from fleetrun.records import tracefile

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train


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
        # The wait for a processor is a total, without spans.
        kinds = trace.seconds.keys() - {"queued"}
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
        parts = {"step", "forward", "backward", "update", "data", "queued"}
        assert set(trace.seconds) == parts
        assert trace.hidden is None
