"""The coordinator knows how every host ended."""

from __future__ import annotations

from fleetrun.run.events import Failure
from fleetrun.session import state
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.messages import Entry, RosterMessage, Verdict

ENTRIES = tuple(
    Entry(f"l{host}", f"10.0.0.{host}", f"node-{host}", (1, 2), ()) for host in range(4)
)


def test_every_host_has_an_end_and_one_was_first() -> None:
    first = Failure("10.0.0.1", "rank 2 exited with 7", 7)
    victim = Failure("10.0.0.2", "rank 4 exited with 1", 1, is_victim=True)
    ended = state.begin(RendezvousConfig(4, 4), 0.0)._replace(
        roster=RosterMessage(0, 0, ENTRIES, RendezvousConfig(4, 4)),
        reports={
            "l1": state.Report(1.0, "l1", first),
            "l2": state.Report(1.1, "l2", victim),
        },
        verdict=Verdict(0, "l1", first, is_final=True),
    )
    ends = state.host_ends(ended)
    assert [end.exit_code for end in ends] == [1, 7, 1, 1]
    assert [end.is_first for end in ends] == [False, True, False, False]
    assert [end.is_victim for end in ends] == [False, False, True, False]
    assert ends[3].what == state.UNKNOWN
    well = ended._replace(reports={}, verdict=Verdict(0, "", None, is_final=True))
    assert {end.what for end in state.host_ends(well)} == {state.SUCCEEDED}
    assert state.host_ends(state.begin(RendezvousConfig(4, 4), 0.0)) == ()
