"""Every file that a launch leaves in its run directory is in the table of files."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import reference_tables
from commandline import Command

from fleetrun.rundir import (
    eventfile,
    manifestfile,
    metricsfile,
    names,
    planfile,
    rankfile,
    reportfile,
    strategyfiles,
)

if TYPE_CHECKING:
    from pathlib import Path

RANK = r"(?:\d+|server\.\d+)"
PARTS = {"rank": RANK, "log": r"(?:worker|server|heter)log\.\d+", "attempt": r"\d+", "part": r"\d+"}


def pattern(name: str) -> re.Pattern[str]:
    """Return a pattern of the files that a row's NAME stands for."""
    text = re.escape(name).replace(r"\{", "{").replace(r"\}", "}")
    return re.compile(text.format(**PARTS))


def test_all_that_a_launch_leaves_is_in_the_table(tmp_path: Path) -> None:
    script = """
open(os.environ["FLEETRUN_HEARTBEAT"], "w").write("3")
print("x" * 200_000)
if rank: time.sleep(600)
raise ValueError("no")
"""
    job = Command.python(tmp_path, script, "--max_restart=1", "--strategy=recommended")
    assert job.run().code
    log = tmp_path / "log"
    assert names.RUNS in {path.name for path in log.iterdir()}
    latest = log / names.LATEST
    left = {path.name for path in latest.iterdir()}
    strange = {
        name
        for name in left
        if not any(pattern(file.name).fullmatch(name) for file in reference_tables.FILES)
    }
    assert not strange
    expected = {names.LOCK, names.PLAN, names.EVENTS, names.MANIFEST, names.REPORT, names.LAUNCH}
    assert {*expected, names.ENDPOINTS, names.STRATEGY, names.rank_records("0")} <= left
    for file in reference_tables.FILES:
        if file.schema is None:
            continue
        for name in left:
            if pattern(file.name).fullmatch(name):
                lines = (latest / name).read_text().splitlines()
                documents = lines if name.endswith(".jsonl") else ["\n".join(lines)]
                for document in documents:
                    assert json.loads(document)["schema"] == file.schema, name


def test_the_schemas_of_the_table_are_those_of_the_writers() -> None:
    schemas = {file.name: file.schema for file in reference_tables.FILES if file.schema is not None}
    assert schemas == {
        names.PLAN: planfile.SCHEMA,
        names.EVENTS: eventfile.SCHEMA,
        names.METRICS: metricsfile.SCHEMA,
        names.MANIFEST: manifestfile.SCHEMA,
        names.REPORT: reportfile.SCHEMA,
        names.STRATEGY: strategyfiles.DOCUMENT_SCHEMA,
        names.rank_records("{rank}"): rankfile.SCHEMA,
    }
