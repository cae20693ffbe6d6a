"""The engine of hosts that find each other: the request of each host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from planning import a_request, gathered, gpus, some_facts

from fleetrun.model import Address

if TYPE_CHECKING:
    from fleetrun.model import Facts, Roster


def assign(facts: Facts | None = None, *, dry: bool = True, **fields: Any) -> Roster:
    """Gather the request of a host with two ranks."""
    wanted = {"nnodes": "2", "master": "10.0.0.1:6170", "nproc_per_node": 2, **fields}
    return gathered(a_request(**wanted), facts or some_facts(2), dry=dry)


@pytest.mark.parametrize("dry", [True, False])
def test_a_host_brings_its_devices_and_held_ports(dry: bool) -> None:
    roster = assign(dry=dry)
    member = roster.members[0]
    # A dry run shows all hosts, and a readable value for what is not known.
    assert len(roster.members) == (2 if dry else 1)
    assert (roster.engine, roster.me, member.host) == ("master", 0, "10.0.0.1" if dry else "")
    assert member.groups == (gpus(0), gpus(1))
    assert len({*member.ports, roster.master.port}) == 3


def test_its_address_is_known_where_somebody_says_it() -> None:
    assert assign(host="10.0.0.2").members[0].host == "10.0.0.2"
    facts = some_facts(2, network=Address("eth1", "10.1.0.2"))
    assert assign(facts).members[0].host == "10.1.0.2"


def test_ports_count_from_a_start_port() -> None:
    assert assign(start_port=7000).members[0].ports == (7000, 7001)


def test_one_host_does_not_meet() -> None:
    assert assign(nnodes="1").engine == "local"
