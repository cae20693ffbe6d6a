"""report.json is read back as it was written, and as far as it goes whatever is in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetrun.records import names, reportfile
from fleetrun.records.folder import Folder
from fleetrun.records.reportfile import CulpritRecord, EndRecord, ReportRecord, VictimRecord

if TYPE_CHECKING:
    from pathlib import Path

END = EndRecord("trainer.0", 0, 7, 1, 3)
WHOLE = ReportRecord(
    "rank 0 exited with 3",
    3,
    2,
    1.5,
    CulpritRecord(END, "h", "GPU 0", 1.5, 0.5, "ValueError", "no", "Traceback", "", "/l", ("a",)),
    (VictimRecord(EndRecord("trainer.1", 1, 8, 1, None, "SIGTERM"), 0.1, "stopped"),),
    ("The kernel says so.",),
    ("rank 1 exited with 1",),
)
KEYS = [*ReportRecord._fields, *CulpritRecord._fields, *EndRecord._fields, "class", "schema"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    reportfile.write(Folder(str(tmp_path)), WHOLE)
    assert reportfile.read(str(tmp_path / names.REPORT)) == WHOLE


def test_the_keys_are_those_of_schema_1(tmp_path: Path) -> None:
    reportfile.write(Folder(str(tmp_path)), WHOLE, lambda text: text.replace("no", "***"))
    found = json.loads((tmp_path / names.REPORT).read_text())
    assert " ".join(found) == (
        "schema outcome exit_code attempts time culprit victims evidence earlier"
    )
    end = "process rank pid attempt code signal fault"
    assert " ".join(found["culprit"]) == (
        f"{end} host devices time after_s class message stack raw log last_words known remedy "
        "peak_bytes"
    )
    assert " ".join(found["victims"][0]) == f"{end} after_s how"
    assert found["culprit"]["message"] == "***"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=30) | ANYTHING.map(lambda one: json.dumps(one).encode()))
def test_no_file_breaks_the_reader(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(text)
    reportfile.read(str(path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING))
def test_what_is_of_another_kind_is_left_out(tmp_path: Path, found: dict[str, object]) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**found, "schema": 1}))
    assert reportfile.read(str(path)) is not None
