"""The hosts that take part, and which of them is this one."""

from __future__ import annotations

from typing import Any

import pytest
from planning import a_request, from_variable, some_facts

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.plan import hosts


def place(names: tuple[str, ...], dry: bool = False, **fields: Any) -> tuple[int, tuple[str, ...]]:  # noqa: FBT002
    """Find this host (10.0.0.1, node1) among NAMES."""
    return hosts.place(names, a_request(ips=names, **fields), some_facts(), dry=dry)


@pytest.mark.parametrize(
    ("ips", "message"),
    [
        (("10.0.0.1", ""), "an address is missing between two commas"),
        (("fe80::1",), "neither an IPv4 address nor a host name"),
        (("256.0.0.1",), "256.0.0.1 is neither an IPv4 address nor a host name"),
        (("1.2.3", "10.0.0.1"), "1.2.3 is neither"),
        (("a;b",), "a;b is neither"),
        (("node one",), "node one is neither"),
        (("-x",), "-x is neither"),
        (("a..b",), "a..b is neither"),
        (("10.0.0.1:6070",), "ports come from --start_port"),
        (("10.0.0.1", "10.0.0.1"), "names 10.0.0.1 twice"),
        (("10.0.0.2", "127.0.0.1"), "127.0.0.1 is a loopback address"),
        (("localhost", "10.0.0.2"), "localhost is a loopback address"),
    ],
)
def test_lists_that_cannot_work_are_usage_errors(ips: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hosts.listed(a_request(ips=ips))


def test_the_number_of_hosts_must_agree_with_their_list() -> None:
    ips = ("10.0.0.1", "10.0.0.2")
    assert hosts.listed(a_request(ips=ips, nnodes="2")) == ips
    with pytest.raises(
        UsageError, match=r"--nnodes=3 disagrees with --ips=10\.0\.0\.1,10\.0\.0\.2"
    ):
        hosts.listed(a_request(ips=ips, nnodes="3"))


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


def test_a_dry_run_may_be_done_by_a_stranger() -> None:
    assert place(("10.0.0.8", "10.0.0.9"), dry=True) == (
        0,
        ("none of --ips=10.0.0.8,10.0.0.9 is this host: shown as 10.0.0.8 would see it.",),
    )


def test_the_host_option_decides() -> None:
    trusted = ("--host=10.0.0.8 is trusted, although this host has 10.0.0.1 (eth0).",)
    assert place(("10.0.0.1", "10.0.0.8"), host="10.0.0.1") == (0, ())
    assert place(("10.0.0.9", "10.0.0.8"), host="10.0.0.8") == (1, trusted)


def test_a_host_that_is_listed_by_another_address_than_it_is_given_is_refused() -> None:
    names = ("10.0.0.1", "10.0.0.8")
    with pytest.raises(
        UsageError, match=r"10.0.0.8 is another host .*, where this one is 10.0.0.1:"
    ):
        place(names, host="10.0.0.8")
    # A dry run shows what another host would do.
    assert place(names, dry=True, host="10.0.0.8")[0] == 1


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
