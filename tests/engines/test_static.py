"""The engine of hosts that are listed."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
from planning import a_request, gathered, gpus, some_facts

from fleetrun.errors import EnvironmentFault
from fleetrun.model import Endpoint

if TYPE_CHECKING:
    from fleetrun.model import Facts, Roster

TWO = ("10.0.0.1", "10.0.0.2")


def assign(facts: Facts | None = None, *, dry: bool = True, **fields: Any) -> Roster:
    """Gather the hosts of a request with FIELDS, two ranks on each."""
    roster = gathered(a_request(nproc_per_node=2, **fields), facts or some_facts(2), dry=dry)
    assert roster.engine == "static"
    return roster


def test_every_host_has_the_same_ports() -> None:
    roster = assign(ips=("10.0.0.2", "10.0.0.1"))
    assert [member.host for member in roster.members] == ["10.0.0.2", "10.0.0.1"]
    assert {member.ports for member in roster.members} == {(6070, 6071)}
    assert {member.groups for member in roster.members} == {(gpus(0), gpus(1))}
    assert (roster.me, roster.engine, roster.notes) == (1, "static", ())
    assert roster.master == Endpoint("10.0.0.2", 6070)


def test_only_our_own_ports_are_checked_and_on_all_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"Port {port} is taken by pid"):
            assign(ips=TWO, start_port=port, dry=False)


def test_a_stranger_is_refused_but_may_look() -> None:
    with pytest.raises(EnvironmentFault, match="none of them is this host"):
        assign(ips=("10.0.0.8", "10.0.0.9"), dry=False)
    assert assign(ips=("10.0.0.8", "10.0.0.9")).notes != ()
