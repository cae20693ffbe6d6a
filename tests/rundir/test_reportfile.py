"""report.json is read back as it was written, and as far as possible whatever it contains."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleetrun.rundir import names, reportfile
from fleetrun.rundir.folder import Folder
from fleetrun.rundir.reportfile import ProcessEnd, ReportRecord, RestartRecord

if TYPE_CHECKING:
    from pathlib import Path

END = ("trainer.0", 0, 7, 1, 3, None, None)
WHOLE = ReportRecord(
    "rank 0 exited with 3",
    3,
    2,
    1.5,
    ProcessEnd(*END, "h", "GPU 0", 1.5, 0.5, "ValueError", "no", "Traceback", "/l", ("a",)),
    (ProcessEnd("trainer.1", 1, 8, 1, None, "SIGTERM", after_s=0.1, how="stopped"),),
    ("The kernel says so.",),
    ("rank 1 exited with 1",),
    (RestartRecord(1, 0.5, "rank 1 exited with 1"),),
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    reportfile.write(Folder(str(tmp_path)), WHOLE)
    assert reportfile.read(str(tmp_path / names.REPORT)) == WHOLE


def test_the_keys_are_those_of_schema_1(tmp_path: Path) -> None:
    reportfile.write(Folder(str(tmp_path)), WHOLE, lambda text: text.replace("no", "***"))
    document = json.loads((tmp_path / names.REPORT).read_text())
    assert " ".join(document) == (
        "schema outcome exit_code attempts time culprit victims evidence earlier restarts"
    )
    assert document["culprit"].keys() == document["victims"][0].keys()
    assert " ".join(document["culprit"]) == (
        "process rank pid attempt code signal fault host devices time after_s class message stack "
        "log last_words known remedy peak_bytes how"
    )
    assert document["culprit"]["message"] == "***"
