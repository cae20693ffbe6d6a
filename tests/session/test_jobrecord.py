"""What etcd has of a job, which anybody may have written."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.session import jobrecord
from fleetrun.session.jobrecord import HostStrikes, JobRecord, LeaderRecord, RosterEntry

NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
NUMBERS = st.integers(0, 10**6)
LEADERS = st.builds(LeaderRecord, NAMES, NAMES, st.integers(1, 65535), NAMES, NUMBERS)
ENTRIES = st.lists(st.builds(RosterEntry, NAMES, NAMES, NAMES, NUMBERS), min_size=1, max_size=4)
STRIKES = st.lists(st.builds(HostStrikes, NAMES, NAMES, NUMBERS), max_size=4)
RECORDS = st.builds(
    JobRecord, NAMES, NUMBERS, NUMBERS, NAMES, ENTRIES.map(tuple), STRIKES.map(tuple)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(LEADERS, RECORDS)
def test_what_is_written_is_read(leader: LeaderRecord, record: JobRecord) -> None:
    assert jobrecord.read_leader(jobrecord.write(leader)) == leader
    assert jobrecord.read_record(jobrecord.write(record)) == record


@given(st.text() | JSON.map(json.dumps))
def test_what_a_stranger_has_written_is_nothing_or_a_value(text: str) -> None:
    for found in (jobrecord.read_leader(text), jobrecord.read_record(text)):
        assert found is None or isinstance(found, LeaderRecord | JobRecord)
    assert jobrecord.read_leader("[" * 100_000) is None


def test_numbers_out_of_range_are_no_leader() -> None:
    for port in (0, 65536):
        assert jobrecord.read_leader(jobrecord.write(LeaderRecord("a", "b", port, "j", 0))) is None
    assert jobrecord.read_leader('["a", "b", 1, "j", -1]') is None
    assert jobrecord.read_record('["j", 0, 0, "a", [], []]') is None
    assert jobrecord.read_record('["j", 0, 0, "a", [["a", "b", 7, 0]], []]') is None
    well = '["j", 0, 0, "a", [["a", "b", "c", %d]], [["d", "e", %d]]]'
    assert jobrecord.read_record(well % (0, 0)) is not None
    for strikes in ((-1, 0), (0, -1)):
        assert jobrecord.read_record(well % strikes) is None
