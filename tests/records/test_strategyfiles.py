"""What ranks and the launcher write of a strategy is read as far as it can be, whatever it is."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.model import FieldVerdict
from fleetrun.records import reading
from fleetrun.records.strategyfiles import (
    StrategyDocument,
    parse_document,
    parse_evidence,
)

KEYS = """
schema complete paddle graph device knobs notes disagreements ranks_equal compared_after counts
strategy build_strategy sources mode strict reasons environment name status in_effect asked reason
evidence script used gradients allreduces bucket_bytes groups
"""
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=5)
    ),
)


@given(st.dictionaries(st.sampled_from(KEYS.split()), ANYTHING))
def test_no_document_breaks_the_readers(document: dict[str, object]) -> None:
    text = json.dumps({**document, "schema": 1})
    assert parse_evidence(reading.parse(text.encode())) is not None
    parse_document(text)


@given(st.binary(max_size=50))
def test_no_bytes_break_the_readers(text: bytes) -> None:
    parse_evidence(reading.parse(text))
    parse_document(text.decode(errors="surrogateescape"))


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
        "knobs": [1, {}, {"name": 7, "status": ["x"], "in_effect": {"a": [1.5, None]}}],
        "notes": {"a": 1},
        "disagreements": [None, {"name": "x"}],
        "ranks_equal": 0,
    }
    read = parse_evidence(odd)
    assert read is not None
    assert read.fields == (FieldVerdict("7", "", "a=1.5,", "no_word"),)
    assert (read.is_complete, read.notes, read.ranks_equal) == (False, (), None)
