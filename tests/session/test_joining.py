"""A host's request to join fits into a message, however many hosts there are."""

from __future__ import annotations

from fleetrun.session.codec import LONGEST_TEXT
from fleetrun.session.joining import comparable


def test_a_list_of_very_many_hosts_is_compared_by_its_digest() -> None:
    hosts = [f"node{number}.cluster.example.org" for number in range(5000)]
    first, second = ",".join(hosts), ",".join(reversed(hosts))
    assert len(first) > LONGEST_TEXT
    assert len(comparable(first)) < LONGEST_TEXT // 2
    assert comparable(first) == comparable(first) != comparable(second)
    assert comparable("a,b") == "a,b"
