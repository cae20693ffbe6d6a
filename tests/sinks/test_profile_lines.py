"""A launch's lines about the steps that its ranks recorded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from planning import a_request, a_roster, some_facts

from fleetrun import argv, planner, request
from fleetrun.commands.report import charts
from fleetrun.errors import UsageError
from fleetrun.plan.devices import Share
from fleetrun.records import tracefile

if TYPE_CHECKING:
    from pathlib import Path

SPANS = [("step 3", "step", 0, 0, 90), ("bucket 0", "flight", 1, 10, 30)]
TRACE = {
    "schema": 1,
    "traceEvents": [
        *(
            {"name": "thread_name", "ph": "M", "tid": tid, "args": {"name": name}}
            for tid, name in enumerate(("training", "bucket 0"))
        ),
        *(
            {"name": name, "cat": cat, "ph": "X", "tid": tid, "ts": ts * 1e3, "dur": dur * 1e3}
            for name, cat, tid, ts, dur in SPANS
        ),
    ],
    "otherData": {
        "rank": 0,
        "first_step": 3,
        "summary": {"steps": 1, "seconds": {"step": 0.09, "forward": 0.04}, "hidden": 0.25},
    },
}


def test_the_end_says_where_the_time_went_and_who_left_no_trace(tmp_path: Path) -> None:
    code = f"""
steps, _, path = os.environ.get("FLEETRUN_PROFILE", "").partition(":")
open(f"asked.{{rank}}", "w").write(f"{{steps}} {{os.path.basename(path)}}")
if rank == 0:
    open(path, "w").write({json.dumps(TRACE)!r})
"""
    job = Command.python(tmp_path, code, "--profile=0-1:3", ranks=3)
    job.argv.remove("--quiet")
    done = job.run()
    assert done.code == 0
    asked = [(tmp_path / f"asked.{rank}").read_text() for rank in range(3)]
    assert asked == ["3-3 trace.0.json", "3-3 trace.1.json", " "]
    told = "rank 0, step 3: 90 ms a step: forward 40 ms; 25 % of communication hidden."
    assert f"Profile of {told}" in done.stderr
    assert "Profile: no trace of rank 1:" in done.stderr


def test_the_last_step_is_drawn_with_a_row_for_each_bucket(tmp_path: Path) -> None:
    (tmp_path / "trace.0.json").write_text(json.dumps(TRACE))
    trace = tracefile.read(str(tmp_path / "trace.0.json"))
    assert trace is not None
    drawn = charts.step(trace)
    assert "allreduce in flight</span>" in drawn
    assert drawn.count('class="point"') == 1
    assert "<title>bucket 0: 30.00 ms</title>" in drawn
    assert drawn.index(">training</text>") < drawn.index(">bucket 0</text>")


@pytest.mark.parametrize("text", ["", "0:0", "0:5-3", "0:1-9999", "0:x", "0:", "first", "0:-3"])
def test_what_cannot_be_meant_is_a_sentence(text: str) -> None:
    words = (f"--profile={text}", "train.py")
    if not text:
        assert request.resolve(argv.split(words), {}, None).profile is None
        return
    with pytest.raises(UsageError, match="--profile"):
        request.resolve(argv.split(words), {}, None)


def test_a_rank_that_the_job_does_not_have_is_refused() -> None:
    roster = a_roster(("10.0.0.1", "10.0.0.2"))
    share = Share("gpu", roster.members[0].groups, "nccl")
    with pytest.raises(UsageError, match="there is no rank 4"):
        planner.plan(a_request(profile="4:3-7"), some_facts(), share, roster)
