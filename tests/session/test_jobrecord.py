"""The records of a job in etcd, which anybody may have written."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.session import jobrecord
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.jobrecord import JobRecord, LeaderRecord, RosterEntry

NAMES = st.text("abcXYZ012._:-", max_size=20).filter(lambda name: not name.startswith("-"))
NUMBERS = st.integers(0, 10**6)
LEADERS = st.builds(LeaderRecord, NAMES, NAMES, st.integers(1, 65535), NAMES, NUMBERS)
ENTRY = st.builds(RosterEntry, NAMES, NAMES, NAMES, NUMBERS)
ENTRIES = st.lists(ENTRY, min_size=1, max_size=4).map(tuple)
OTHERS = st.lists(ENTRY, max_size=4).map(tuple)
SECONDS = st.floats(0.0, 1e6)
CONFIG = st.builds(
    RendezvousConfig,
    st.just(1),
    st.integers(1, 9),
    names=st.just(()),
    addresses=st.just(()),
    max_restarts=NUMBERS,
    spares=NUMBERS,
    **{name: SECONDS for name in RendezvousConfig._fields if name.endswith("_s")},
)
RECORDS = st.builds(JobRecord, NAMES, NUMBERS, NUMBERS, NAMES, ENTRIES, CONFIG, OTHERS)
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
    for parsed in (jobrecord.read_leader(text), jobrecord.read_record(text)):
        assert parsed is None or isinstance(parsed, LeaderRecord | JobRecord)
    assert jobrecord.read_leader("[" * 100_000) is None


def test_numbers_out_of_range_are_neither() -> None:
    leader = LeaderRecord("a", "b", 1, "j", 0)
    bads = (leader._replace(port=0), leader._replace(port=65536), leader._replace(generation=-1))
    for bad in bads:
        assert jobrecord.read_leader(jobrecord.write(bad)) is None
    entry, count = RosterEntry("a", "b", "c"), RosterEntry("", "d", "e")
    record = JobRecord("j", 0, 0, "a", (entry,), RendezvousConfig(1, 2), (count,))
    assert jobrecord.read_record(jobrecord.write(record)) == record
    for other in (
        record._replace(entries=()),
        record._replace(generation=-1),
        record._replace(entries=(entry._replace(failure_count=-1),)),
        record._replace(entries=(entry._replace(host="\x1b"),)),
        record._replace(others=(count._replace(failure_count=-1),)),
        record._replace(config=RendezvousConfig(2, 1)),
        record._replace(config=RendezvousConfig(1, 2, names=("a", "b"))),
        record._replace(config=RendezvousConfig(1, 2, heartbeat_timeout_s=-1.0)),
    ):
        assert jobrecord.read_record(jobrecord.write(other)) is None
