"""Strategy records of ranks and the launcher are read as far as possible, whatever they contain."""

from __future__ import annotations

from fleetrun.model import FieldVerdict
from fleetrun.rundir import reading
from fleetrun.rundir.strategyfiles import (
    StrategyDocument,
    parse_document,
    parse_evidence,
)


def test_what_is_no_document_says_nothing() -> None:
    nested = '{"schema": 1, "notes": ' + "[" * 900 + "]" * 900 + "}"
    parse_evidence(reading.parse(nested.encode()))
    assert parse_evidence({"schema": 2}) is None
    assert parse_evidence(None) is None
    assert parse_document("[") == StrategyDocument(())


def test_evidence_with_fields_of_any_kind_is_read_as_far_as_it_goes() -> None:
    odd = {
        "schema": 1,
        "complete": "yes",
        "paddle": 3,
        "fields": [1, {}, {"name": 7, "status": ["x"], "in_effect": {"a": [1.5, None]}}],
        "notes": {"a": 1},
        "disagreements": [None, {"name": "x"}],
        "ranks_equal": 0,
    }
    read = parse_evidence(odd)
    assert read is not None
    assert read.fields == (FieldVerdict("7", "", "a=1.5,", "no_word"),)
    assert (read.is_complete, read.notes, read.ranks_equal) == (False, (), None)
