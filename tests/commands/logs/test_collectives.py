"""`fleetrun logs --collectives` of a run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runfolders import big, ring

from fleetrun.commands.logs import collectives
from fleetrun.records import runs

if TYPE_CHECKING:
    from pathlib import Path


def test_a_host_that_joined_later_has_the_collectives_of_its_ranks(tmp_path: Path) -> None:
    # Its first attempt is the third of the job, which is what its ranks know.
    run_dir = big(tmp_path / "run", 6, generation=2)
    (run_dir / "collectives.0").write_bytes(ring(0, [(1e9, 1e9 + 1)], generation=2))
    assert "sum 1" in collectives.text([runs.read(str(run_dir))], None)
