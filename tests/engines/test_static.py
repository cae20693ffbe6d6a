"""The engine of hosts that are listed."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
from planning import a_request, gpus, some_facts

from fleetrun import engines
from fleetrun.errors import EnvironmentFault
from fleetrun.model import Endpoint

if TYPE_CHECKING:
    from fleetrun.model import Facts, Roster

TWO = ("10.0.0.1", "10.0.0.2")
CLOUD = {
    "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
    "POD_IP": "10.0.0.2",
    "PADDLE_TRAINER_ID": "1",
    "TRAINER_PORTS_NUM": "2",
}


def gather(facts: Facts | None = None, *, dry: bool = True, **fields: Any) -> Roster:  # noqa: ANN401
    """Gather the hosts of a request with FIELDS, two ranks on each."""
    request, facts = a_request(**fields), facts or some_facts()
    engine = engines.choose(request, facts, dry=dry)
    assert engine.name == "static"
    try:
        return engine.gather(request, facts, (gpus(0), gpus(1)))
    finally:
        engine.close()


def test_every_host_has_the_same_ports() -> None:
    roster = gather(ips=("10.0.0.2", "10.0.0.1"))
    assert [member.host for member in roster.members] == ["10.0.0.2", "10.0.0.1"]
    assert {member.ports for member in roster.members} == {(6070, 6071)}
    assert {member.groups for member in roster.members} == {(gpus(0), gpus(1))}
    assert (roster.me, roster.engine, roster.notes) == (1, "static", ())
    assert roster.master == Endpoint("10.0.0.2", 6070)


def test_start_port_counts_on_every_host() -> None:
    roster = gather(ips=TWO, start_port=7000)
    assert {member.ports for member in roster.members} == {(7000, 7001)}
    assert roster.master.port == 7000


def test_only_our_own_ports_are_checked_and_on_all_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"Port {port} is taken by pid"):
            gather(ips=TWO, start_port=port, dry=False)


def test_several_hosts_on_loopback_share_this_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ips = ("127.0.0.1", "127.0.0.2")
        roster = gather(ips=ips, host="127.0.0.2", start_port=port, dry=False)
    assert roster.me == 1


def test_a_stranger_is_refused_but_may_look() -> None:
    with pytest.raises(EnvironmentFault, match="none of them is this host"):
        gather(ips=("10.0.0.8", "10.0.0.9"), dry=False)
    assert gather(ips=("10.0.0.8", "10.0.0.9")).notes != ()


def test_paddlecloud_names_hosts_ports_and_place() -> None:
    facts = some_facts(environ={**CLOUD, "PADDLE_PORT": "8800"})
    roster = gather(facts)
    assert [member.host for member in roster.members] == list(TWO)
    assert {member.ports for member in roster.members} == {(8800, 8801)}
    assert (roster.me, roster.notes) == (1, ())
    assert roster.master == Endpoint("10.0.0.1", 8800)


def test_paddlecloud_wins_over_the_list_and_says_so() -> None:
    facts = some_facts(environ=CLOUD)
    assert gather(facts, ips=TWO).notes == ()
    (note,) = gather(facts, ips=("1.1.1.1",)).notes
    assert note.startswith("--ips=1.1.1.1 is not used: PADDLE_TRAINERS=10.0.0.1,10.0.0.2")


def test_two_ranks_may_not_have_one_endpoint() -> None:
    facts = some_facts(environ={**CLOUD, "PADDLE_TRAINERS": "10.0.0.2,10.0.0.2"})
    with pytest.raises(EnvironmentFault, match=r"Two ranks would have the endpoint 10\.0\.0\.2:"):
        gather(facts)
