"""plan.json is read back as it was written, and as far as it goes whatever is in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import plans
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetrun.records import names, planfile
from fleetrun.records.folder import Folder
from fleetrun.records.planfile import PlanRecord, ProcessRecord

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [*PlanRecord._fields, *ProcessRecord._fields]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    plan = plans.plan(argv=("train", "--token=hush"), notes=("A note.",))
    planfile.write(Folder(str(tmp_path)), plan)
    read = planfile.read(str(tmp_path / names.PLAN))
    assert read is not None
    assert read[:8] == (
        *("default", "collective", "local", 0, 0),
        *(("127.0.0.1",), "/home/me/job", ("A note.",)),
    )
    assert read.processes == tuple(
        ProcessRecord(
            f"trainer.{rank}",
            rank,
            ("train", "--token=***"),
            (),
            log,
            essential=True,
            devices=(f"gpu:{4 + rank}",),
        )
        for rank, log in enumerate(("workerlog.0", "workerlog.1"))
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING))
def test_no_file_breaks_the_reader(tmp_path: Path, found: dict[str, object]) -> None:
    path = tmp_path / names.PLAN
    path.write_text(json.dumps({**found, "schema": 1}))
    assert planfile.read(str(path)) is not None
    path.write_text(json.dumps({**found, "schema": 2}))
    assert planfile.read(str(path)) is None
