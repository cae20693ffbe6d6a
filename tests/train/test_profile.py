"""Paddle's profile of a few steps of a real training, which it does not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training import PYTHONS, RUN, SITE, STATIC, mostly, run, train

pytestmark = pytest.mark.train


def steps(path: Path) -> int:
    """Return how many steps the trace PATH has."""
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event.get("cat") == "Operator" for event in events)
    return sum(event.get("cat") == "ProfileStep" for event in events)


@pytest.mark.parametrize("version", mostly("2.6.2"))
def test_the_steps_that_are_asked_for_are_in_the_trace(version: str, tmp_path: Path) -> None:
    folder, asked = tmp_path / "run", {"fuse_grad_size_in_num": 2}
    first, second = train(PYTHONS[version], "profiled.py", folder, asked, profile="3-5")
    assert first == second
    assert [steps(folder / f"trace.{rank}.json") for rank in range(2)] == [3, 3]


def test_each_run_of_a_static_program_is_one_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STATIC + 4 * RUN)
    trace = tmp_path / "trace"
    more = {"PYTHONPATH": str(SITE), "FLEETRUN_PROFILE": f"1-9:{trace}"}
    done = run(PYTHONS["3.3.1"], ["-W", "ignore", "train.py"], tmp_path, **more)
    assert done.returncode == 0, done.stdout
    # The last one is cut off by the end of the script.
    assert steps(trace) == 5
