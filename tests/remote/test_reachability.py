"""Each host of a job by ssh tries to connect to every other one, and names those that it cannot."""

from __future__ import annotations

import pytest
from ports import free

from fleetrun.remote import reachability
from fleetrun.remote.protocol import HostEndpoint


def test_who_listens_is_reached_until_the_door_is_closed() -> None:
    first, second = free(2)
    open_port = reachability.OpenPort((first, second))
    other = reachability.OpenPort((first, second))
    assert (open_port.port, other.port) == (first, second)
    places = [HostEndpoint("a", "127.0.0.1", first), HostEndpoint("b", "localhost", second)]
    assert reachability.missing(places) == ()
    other.close()
    ((name, _),) = reachability.missing(places)
    assert name == "b"
    open_port.close()


@pytest.mark.parametrize("name", ["127.0.0.1", "no such host"])
def test_nobody_is_reached_where_nothing_listens(name: str) -> None:
    # The port of tcpmux, which nobody runs.
    ((_, why),) = reachability.missing([HostEndpoint("b", name, 1)])
    assert why.startswith(f"it does not reach b at {name}:1 (")
