"""The engine of a job on one host."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
from planning import a_request, gathered, gpus, some_facts

from fleetrun.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    from fleetrun.model import Facts, Roster

GROUPS = (gpus(0), gpus(1))


def assign(facts: Facts | None = None, *, dry: bool = True, **fields: Any) -> Roster:
    """Gather the hosts of a request with FIELDS, two ranks on this one."""
    roster = gathered(a_request(nproc_per_node=2, **fields), facts or some_facts(2), dry=dry)
    assert roster.engine == "local"
    return roster


@pytest.mark.parametrize("dry", [True, False])
def test_every_rank_has_a_port_and_the_master_another(dry: bool) -> None:
    roster = assign(dry=dry)
    (member,) = roster.members
    assert (member.host, member.groups, roster.me, roster.engine) == (
        "127.0.0.1",
        GROUPS,
        0,
        "local",
    )
    assert roster.master.host == "127.0.0.1"
    assert len({*member.ports, roster.master.port}) == 3
    assert roster.notes == ()


def test_ports_that_are_asked_for_are_checked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"Port {port} is taken"):
            assign(start_port=port, dry=False)


def test_a_single_host_that_is_not_this_one_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="none of them is this host"):
        assign(ips=("10.0.0.9",), dry=False)


def test_the_host_option_gives_the_address() -> None:
    assert assign(host="10.0.0.1").master.host == "10.0.0.1"
    roster = assign(host="10.0.0.9")
    assert roster.members[0].host == "127.0.0.1"
    assert roster.notes == (
        "--host=10.0.0.9 is not an address of this host: the ranks use 127.0.0.1.",
    )


def test_hosts_that_nobody_names_cannot_come() -> None:
    with pytest.raises(UsageError, match="--nnodes=2 names no hosts"):
        assign(nnodes="2")
