"""Whom the hunt hits, and whom it must not."""

from __future__ import annotations

from fleetrun.run.jobprocesses import ProcessEntry, of_job


def process(pid: int, parent: int, session: int, *, is_marked: bool = False) -> ProcessEntry:
    return ProcessEntry(pid, parent, pid, session, started=pid, is_marked=is_marked)


def test_the_marked_their_sessions_and_their_descendants_die_and_nobody_else() -> None:
    everybody = [
        process(1, 0, 1),
        process(10, 1, 10, is_marked=True),
        process(11, 10, 10),
        # Left its session and its environment behind, and so did its child.
        process(12, 11, 12),
        process(13, 12, 13),
        # In the session of a rank whose parent is gone.
        process(20, 1, 19),
        # Strangers.
        process(30, 1, 30),
        process(31, 30, 30),
    ]
    found = of_job(everybody, leaders=frozenset({19}), spare=frozenset())
    assert sorted(one.pid for one in found) == [10, 11, 12, 13, 20]


def test_the_guard_spares_itself() -> None:
    both = [process(10, 1, 10, is_marked=True), process(40, 10, 40)]
    found = of_job(both, leaders=frozenset(), spare=frozenset({40}))
    assert [one.pid for one in found] == [10]


def test_children_of_who_died_while_we_looked_are_found_by_what_was_seen_before() -> None:
    # The rank, 10, died with its group; its child 12 has no mark and another parent by now.
    seen = [process(12, 1, 12), process(11, 10, 10, is_marked=True)]
    before = [process(10, 1, 10, is_marked=True), process(12, 10, 12)]
    found = of_job([*seen, *before], leaders=frozenset(), spare=frozenset())
    assert sorted(one.pid for one in found) == [10, 11, 12]
