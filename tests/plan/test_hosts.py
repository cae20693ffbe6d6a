"""Which hosts take part, and which of them we are."""

from __future__ import annotations

from typing import Any

import pytest
from planning import a_request, from_variable, some_facts

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Endpoint
from fleetrun.plan import hosts

CLOUD = {
    "PADDLE_TRAINERS": "10.0.0.1, 10.0.0.2",
    "POD_IP": "10.0.0.2",
    "PADDLE_TRAINER_ID": "1",
    "TRAINER_PORTS_NUM": "2",
}


def place(names: tuple[str, ...], dry: bool = False, **fields: Any) -> tuple[int, tuple[str, ...]]:  # noqa: ANN401, FBT001, FBT002
    """Find this host (10.0.0.1, node1) among NAMES."""
    return hosts.place(names, a_request(ips=names, **fields), some_facts(), dry=dry)


def test_nobody_named_a_host() -> None:
    assert hosts.named(a_request(), {}) == ()


def test_hosts_are_stripped() -> None:
    assert hosts.named(a_request(ips=("10.0.0.1", " 10.0.0.2 ")), {}) == ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    ("ips", "message"),
    [
        (("10.0.0.1", ""), "an address is missing between two commas"),
        (("fe80::1",), "neither an IPv4 address nor a host name"),
        (("10.0.0.1:6070",), "ports come from --start_port"),
        (("10.0.0.1", "10.0.0.1"), "names 10.0.0.1 twice"),
        (("10.0.0.2", "127.0.0.1"), "127.0.0.1 is only this host to itself"),
        (("localhost", "10.0.0.2"), "localhost is only this host to itself"),
    ],
)
def test_lists_that_cannot_work_are_usage_errors(ips: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hosts.named(a_request(ips=ips), {})


def test_the_number_of_hosts_must_agree_with_their_list() -> None:
    ips = ("10.0.0.1", "10.0.0.2")
    assert hosts.listed(a_request(ips=ips, nnodes="2")) == ips
    with pytest.raises(
        UsageError, match=r"--nnodes=3 disagrees with --ips=10\.0\.0\.1,10\.0\.0\.2"
    ):
        hosts.listed(a_request(ips=ips, nnodes="3"))


def test_we_are_found_by_any_address_of_ours() -> None:
    assert place(("10.0.0.2", "10.0.0.1")) == (1, ())


def test_we_are_found_by_our_name() -> None:
    assert place(("node2", "node1")) == (1, ())


def test_we_are_found_by_what_a_name_resolves_to() -> None:
    names = ("alpha", "beta")
    facts = some_facts(resolved={"alpha": ("10.0.0.9",), "beta": ("10.0.0.1",)})
    assert hosts.place(names, a_request(ips=names), facts, dry=False) == (1, ())
    # Debian resolves a host's own name to 127.0.1.1.
    facts = some_facts(resolved={"alpha": ("127.0.1.1",), "beta": ()})
    assert hosts.place(names, a_request(ips=names), facts, dry=False) == (0, ())


def test_strangers_are_told_both_sides() -> None:
    names = ("10.0.0.8", "gone")
    facts = some_facts(resolved={"gone": ()})
    with pytest.raises(EnvironmentFault) as caught:
        hosts.place(names, a_request(ips=names), facts, dry=False)
    assert str(caught.value) == (
        "--ips=10.0.0.8,gone: none of them is this host, which has 10.0.0.1 (eth0). gone cannot "
        "be resolved. Run this on the hosts named, or say which one this is with --host."
    )


def test_a_host_without_a_network_says_so() -> None:
    facts = some_facts(addresses=())
    with pytest.raises(EnvironmentFault, match="which has no address but loopback"):
        hosts.place(("10.0.0.8",), a_request(ips=("10.0.0.8",)), facts, dry=False)


def test_a_dry_run_may_be_done_by_a_stranger() -> None:
    assert place(("10.0.0.8", "10.0.0.9"), dry=True) == (
        0,
        ("none of --ips=10.0.0.8,10.0.0.9 is this host: shown as 10.0.0.8 would see it.",),
    )


def test_the_host_option_decides() -> None:
    names = ("10.0.0.1", "10.0.0.8")
    assert place(names, host="10.0.0.1") == (0, ())
    assert place(names, host="10.0.0.8") == (
        1,
        ("--host=10.0.0.8 is trusted, although this host has 10.0.0.1 (eth0).",),
    )


def test_the_host_option_may_be_what_a_name_resolves_to() -> None:
    names = ("alpha", "beta")
    facts = some_facts(resolved={"alpha": ("10.0.0.8",), "beta": ("10.0.0.9",)})
    me, _ = hosts.place(names, a_request(ips=names, host="10.0.0.9"), facts, dry=False)
    assert me == 1


def test_a_host_option_outside_the_list_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"--host=10.9.9.9 is not one of --ips=10.0.0.1,10.0.0.2"):
        place(("10.0.0.1", "10.0.0.2"), host="10.9.9.9")


def test_a_pod_ip_outside_the_list_is_meant_for_something_else() -> None:
    settings = from_variable("host", "10.9.9.9", "POD_IP")
    assert place(("10.0.0.1", "10.0.0.2"), host="10.9.9.9", settings=settings) == (0, ())


def test_two_addresses_of_ours_need_a_word() -> None:
    with pytest.raises(EnvironmentFault, match=r"127.0.0.1 and 127.0.0.2 are all this host; say"):
        place(("127.0.0.1", "127.0.0.2"))
    assert place(("127.0.0.1", "127.0.0.2"), host="127.0.0.2") == (1, ())


def test_a_rank_must_agree_with_the_place() -> None:
    assert place(("10.0.0.2", "10.0.0.1"), rank=1) == (1, ())
    assert place(("10.0.0.2", "10.0.0.1"), rank=-1) == (1, ())
    with pytest.raises(UsageError, match=r"--rank=0 disagrees .* \(10.0.0.1\) has place 1"):
        place(("10.0.0.2", "10.0.0.1"), rank=0)


def test_paddlecloud_names_the_hosts() -> None:
    found = hosts.cloud(a_request(), CLOUD)
    assert found == hosts.Cloud(("10.0.0.1", "10.0.0.2"), me=1, ports_num=2, port=None)
    assert hosts.named(a_request(ips=("1.1.1.1",)), CLOUD) == ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {name: value for name, value in CLOUD.items() if name != "TRAINER_PORTS_NUM"},
        {**CLOUD, "POD_IP": ""},
        {**CLOUD, "PADDLE_TRAINERS_NUM": "1"},
        {**CLOUD, "PADDLE_TRAINERS": "10.0.0.1"},
    ],
)
def test_less_than_all_variables_is_no_paddlecloud(environ: dict[str, str]) -> None:
    assert hosts.cloud(a_request(), environ) is None


def test_the_list_wins_over_paddlecloud_where_paddle_lets_it() -> None:
    environ = {**CLOUD, "PADDLE_LAUNCH_WITH_ARGS": "1"}
    assert hosts.named(a_request(ips=("10.0.0.7",)), environ) == ("10.0.0.7",)
    assert hosts.named(a_request(), environ) == ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"PADDLE_TRAINER_ID": "x"}, "PADDLE_TRAINER_ID=x is not a number"),
        ({"PADDLE_TRAINER_ID": "2"}, "names 2 hosts, 0-1"),
        ({"TRAINER_PORTS_NUM": "-1"}, "TRAINER_PORTS_NUM=-1 is not a number"),
        ({"PADDLE_PORT": "http"}, "PADDLE_PORT=http is not a number"),
        ({"DISTRIBUTED_TRAINER_ENDPOINTS": "a:1,b"}, "b is not HOST:PORT"),
        ({"DISTRIBUTED_TRAINER_ENDPOINTS": "a:1,b:x"}, "b:x is not HOST:PORT"),
        ({"DISTRIBUTED_TRAINER_ENDPOINTS": "a:1,b:2"}, r"2 endpoints, but .* make 4"),
    ],
)
def test_what_paddlecloud_says_is_checked(changed: dict[str, str], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        hosts.cloud(a_request(), {**CLOUD, **changed})


def ports(ranks: int = 2, start_port: int | None = None, **changed: str) -> list[tuple[int, ...]]:
    """Return the ports of each host in PaddleCloud."""
    request = a_request(start_port=start_port)
    found = hosts.cloud(request, {**CLOUD, **changed})
    assert found is not None
    return list(hosts.cloud_ports(found, request, ranks))


def test_paddleclouds_ports_begin_where_it_says() -> None:
    assert ports() == [(6170, 6171)] * 2
    assert ports(PADDLE_PORT="8800") == [(8800, 8801)] * 2
    # As in Paddle: it has too few ports there for three ranks.
    assert ports(3, PADDLE_PORT="8800") == [(6170, 6171, 6172)] * 2
    assert ports(start_port=9000, PADDLE_PORT="8800") == [(9000, 9001)] * 2


def test_paddleclouds_endpoints_are_dealt_out_host_by_host() -> None:
    endpoints = "10.0.0.1:1,10.0.0.1:2, 10.0.0.2:3,10.0.0.2:4"
    assert ports(DISTRIBUTED_TRAINER_ENDPOINTS=endpoints) == [(1, 2), (3, 4)]
    assert ports(1, DISTRIBUTED_TRAINER_ENDPOINTS=endpoints) == [(1,), (3,)]
    with pytest.raises(EnvironmentFault, match=r"3 ranks on this host, but .* has 2 endpoints"):
        ports(3, DISTRIBUTED_TRAINER_ENDPOINTS=endpoints)
    found = hosts.cloud(a_request(), {**CLOUD, "DISTRIBUTED_TRAINER_ENDPOINTS": endpoints})
    assert found is not None
    assert found.endpoints[2] == Endpoint("10.0.0.2", 3)


def test_ports_end_at_the_last_one() -> None:
    assert hosts.port_range(65534, 2) == (65534, 65535)
    for first in (0, 65535):
        with pytest.raises(UsageError, match="do not fit"):
            hosts.port_range(first, 2)
