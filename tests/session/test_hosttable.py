"""The table of hosts is a dict whose changes leave the one before as it was, and which counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.session.hosttable import Tally, table
from fleetrun.session.messages import Offer
from fleetrun.session.seating import Host

OFFER = Offer("", "node", 7, (), ())
NAMES = st.integers(0, 300).map(str)
HOSTS = st.builds(
    Host,
    launcher=NAMES,
    offer=st.just(OFFER),
    address=st.just("10.0.0.1"),
    is_local=st.booleans(),
    connection=st.none() | st.integers(0, 9),
    heard_at=st.floats(0, 9),
    joined_at=st.just(0.0),
    is_joined=st.booleans(),
    is_seated=st.booleans(),
    is_ready=st.booleans(),
    is_done=st.booleans(),
    is_stopped=st.booleans(),
)
CHANGES = st.lists(HOSTS | NAMES, max_size=40)


def tally(hosts: list[Host]) -> Tally:
    """Count by looking at all of them."""
    connected = [host for host in hosts if host.connection is not None]
    seated = [host for host in hosts if host.is_seated]
    return Tally(
        len(connected),
        sum(host.is_joined for host in connected),
        len(seated),
        sum(host.is_ready for host in seated),
        sum(host.is_done for host in seated),
        sum(host.is_stopped for host in seated),
    )


@given(st.lists(HOSTS, max_size=300, unique_by=lambda host: host.launcher), CHANGES)
def test_a_table_is_a_dict_that_is_copied_and_counted(
    first: list[Host], changes: list[Host | str]
) -> None:
    known, expected = table(first), {host.launcher: host for host in first}
    for change in changes:
        before, was = known, dict(expected)
        if isinstance(change, str):
            expected.pop(change, None)
            known = known.without(change)
            assert known.get(change) is None
        else:
            expected[change.launcher] = change
            known = known.with_host(change)
            assert known[change.launcher] == change
        assert list(known.values()) == list(expected.values())
        assert (list(known), len(known)) == (list(expected), len(expected))
        assert known.tally == tally(list(expected.values()))
        assert list(before.values()) == list(was.values())
        assert all(name in known for name in expected)
