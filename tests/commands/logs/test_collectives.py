"""`fleetrun logs --collectives` of a run directory."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING

from runfolders import big, ring

from fleetrun.commands.logs import collectives
from fleetrun.inject.flight_recorder import FlightRecorder
from fleetrun.rundir import runs

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_host_that_joined_later_has_the_collectives_of_its_ranks(tmp_path: Path) -> None:
    # Its first attempt is the third of the job, which is what its ranks know.
    run_dir = big(tmp_path / "run", 6, generation=2)
    (run_dir / "collectives.0").write_bytes(ring(0, [(1e9, 1e9 + 1)], generation=2))
    assert "sum 1" in collectives.text([runs.read(str(run_dir))], None)


def test_a_new_group_has_the_number_of_the_call_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = big(tmp_path / "run", 6)
    monkeypatch.setenv("PADDLE_TRAINER_ID", "2")
    made = FlightRecorder(str(run_dir / "collectives.2"))
    made.add(SimpleNamespace(name=lambda: "GLOO"), range(6))
    # The first one is without this rank.
    made.begin_group((0, 1))
    made.begin_group((1, 2))
    text = collectives.text([runs.read(str(run_dir))], None)
    assert re.search(r"2 +new_group 2 +ranks 1-2 +open", text), text


def test_nobody_waits_in_a_run_that_went_well(tmp_path: Path) -> None:
    run_dir = big(tmp_path / "run", 6)
    for rank in range(6):
        (run_dir / f"collectives.{rank}").write_bytes(ring(rank, [(1e9, 1e9 + 1), (1e9 + 2, 0)]))
    assert "wait there" in collectives.text([runs.read(str(run_dir))], None)
    events = (run_dir / "events.jsonl").read_text()
    finished = events.splitlines()[-1]
    well = json.dumps({**json.loads(finished), "exit_code": 0})
    (run_dir / "events.jsonl").write_text(events.replace(finished, well))
    text = collectives.text([runs.read(str(run_dir))], None)
    assert text.startswith("called")
