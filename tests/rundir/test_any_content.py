"""Whatever a file of a run contains, its reader returns what it can, and never fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetrun.model import FieldVerdict
from fleetrun.rundir import (
    eventfile,
    flightfile,
    metricsfile,
    planfile,
    rankfile,
    reading,
    reportfile,
    strategyfiles,
)
from fleetrun.rundir.metricsfile import GpuUsage, MetricsRecord, RankUse, System
from fleetrun.rundir.reportfile import ProcessEnd, ReportRecord, RestartRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

READERS: dict[str, tuple[Callable[[str], object], tuple[type, ...], str]] = {
    "plan": (planfile.read, (planfile.PlanRecord, planfile.ProcessRecord), "rules"),
    "report": (
        reportfile.read,
        (ReportRecord, ProcessEnd, RestartRecord),
        "class",
    ),
    "events": (
        lambda path: [(event, eventfile.verdicts(event)) for event in eventfile.read(path)],
        (eventfile.EventRecord, FieldVerdict),
        "verdicts",
    ),
    "metrics": (
        lambda path: metricsfile.MetricsReader(path, 8).read(),
        (MetricsRecord, RankUse, GpuUsage, System),
        "",
    ),
    "records": (
        lambda path: [rankfile.topology([path]), *rankfile.updates(path), rankfile.error(path)],
        (rankfile.ErrorReport, rankfile.Update),
        "kind axes class",
    ),
    "evidence": (
        lambda path: strategyfiles.parse_evidence(reading.document(path)),
        (strategyfiles.RankEvidence, strategyfiles.GradientCounts, FieldVerdict),
        "fields disagreements complete paddle evidence reason",
    ),
    "strategy": (
        lambda path: strategyfiles.parse_document((reading.content(path) or b"").decode("latin1")),
        (strategyfiles.StrategyDocument,),
        "strategy build_strategy",
    ),
    "collectives": (lambda path: flightfile.read(path, 0), (), "x"),
}
# Values that are known.
WORDS = ["strategy_report", "exception", "topology", "update", "X", "thread_name", "effective"]


def lines(kinds: tuple[type, ...], more: str) -> st.SearchStrategy[list[bytes]]:
    """Return lines of bytes, and of JSON that has the fields of KINDS, and MORE, at any depth."""
    names = {*more.split(), *(name for kind in kinds for name in kind.__annotations__)}
    key = st.sampled_from(sorted(names))
    word = st.sampled_from(WORDS) | st.text(max_size=4)
    plain = st.none() | st.booleans() | st.integers() | st.floats() | word
    value = st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(key, inner, max_size=4),
    )
    whole = st.dictionaries(key, plain | value | st.lists(value, max_size=3), max_size=8)
    known = whole.map(lambda document: json.dumps({**document, "schema": 1}).encode())
    anything = st.binary(max_size=30) | value.map(lambda document: json.dumps(document).encode())
    return st.tuples(known).map(list) | st.lists(known | anything)


def texts(value: object) -> Iterable[str]:
    """Yield all texts in VALUE."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


@pytest.mark.parametrize("name", READERS)
@settings(examples(60))
@given(data=st.data())
def test_no_file_breaks_its_reader(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    read, kinds, more = READERS[name]
    path = tmp_path_factory.getbasetemp() / name
    content = data.draw(lines(kinds, more))
    path.write_bytes(b"\n".join(content) + b"\n" * data.draw(st.booleans()))
    told = read(str(path))
    if name != "events":
        # What only one kind of event has is as it is in the file.
        for text in texts(told):
            text.encode()


@pytest.mark.parametrize("name", ["plan", "report", "events", "metrics", "evidence"])
def test_a_schema_to_come_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"schema": 9, "event": "started", "outcome": "x"}\n')
    assert not READERS[name][0](str(tmp_path / name))
    assert not READERS[name][0](str(tmp_path / "none"))
