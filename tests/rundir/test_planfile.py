"""plan.json is read back as it was written, and as far as possible whatever it contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plans

from fleetrun.rundir import names, planfile
from fleetrun.rundir.folder import Folder
from fleetrun.rundir.planfile import ProcessRecord

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    plan = plans.plan(argv=("train", "--token=hush"))
    planfile.write(Folder(str(tmp_path)), plan)
    read = planfile.read(str(tmp_path / names.PLAN))
    assert read is not None
    assert read[:5] == ("default", "collective", 0, ("127.0.0.1",), "/home/me/job")
    assert read.processes == tuple(
        ProcessRecord(f"trainer.{rank}", rank, ("train", "--token=***"), log, (f"gpu:{4 + rank}",))
        for rank, log in enumerate(("workerlog.0", "workerlog.1"))
    )
