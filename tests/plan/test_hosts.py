"""The hosts that take part, and which of them is this one."""

from __future__ import annotations

from typing import Any

import pytest
from plans import a_request, from_variable, some_facts

from fleetrun.errors import EnvironmentFault, StrangerFault, UsageError
from fleetrun.plan import hosts
from fleetrun.plan.layout import ModeHosts


def place(names: tuple[str, ...], **fields: Any) -> tuple[int, tuple[str, ...]]:
    """Find this host (10.0.0.1, node1) among NAMES."""
    return hosts.place(ModeHosts(names), a_request(ips=names, **fields), some_facts())


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


OURS = ("10.0.0.1", "10.0.0.2")
LATER = ("10.0.0.2", "10.0.0.1")
STRANGERS = ("10.0.0.8", "10.0.0.9")
LOOPBACK = ("127.0.0.1", "127.0.0.2")
TRUSTED = "--host=10.0.0.8 is trusted, although this host has 10.0.0.1 (eth0)."
SHOWN = "none of --ips=10.0.0.8,10.0.0.9 is this host: shown as 10.0.0.8 would see it."
POD = from_variable("host", "10.9.9.9", "POD_IP")
# Names, fields of the request, our place among them, and remarks.
PLACED: list[tuple[tuple[str, ...], dict[str, Any], int, tuple[str, ...]]] = [
    # A dry run may be done by a stranger, and shows what another host would do.
    (STRANGERS, {"dry_run": "table"}, 0, (SHOWN,)),
    (("10.0.0.1", "10.0.0.8"), {"host": "10.0.0.1"}, 0, ()),
    (("10.0.0.9", "10.0.0.8"), {"host": "10.0.0.8"}, 1, (TRUSTED,)),
    # A $POD_IP outside the list is meant for something else.
    (OURS, {"host": "10.9.9.9", "settings": POD}, 0, ()),
    (LOOPBACK, {"host": "127.0.0.2"}, 1, ()),
    (LATER, {"rank": 1}, 1, ()),
    (LATER, {"rank": -1}, 1, ()),
]


@pytest.mark.parametrize(("names", "fields", "me", "notes"), PLACED)
def test_this_host_has_its_place_among_those_that_are_listed(
    names: tuple[str, ...], fields: dict[str, Any], me: int, notes: tuple[str, ...]
) -> None:
    assert place(names, **fields) == (me, notes)


@pytest.mark.parametrize(
    ("names", "fields", "error", "message"),
    [
        (
            ("10.0.0.1", "10.0.0.8"),
            {"host": "10.0.0.8"},
            UsageError,
            r"10.0.0.8 is another host .*, where this one is 10.0.0.1:",
        ),
        (OURS, {"host": "10.9.9.9"}, UsageError, r"--host=10.9.9.9 is not one of --ips=10.0.0.1,"),
        (LOOPBACK, {}, StrangerFault, r"127.0.0.1 and 127.0.0.2 are all this host; say"),
        (LATER, {"rank": 0}, UsageError, r"--rank=0 disagrees .* \(10.0.0.1\) has place 1"),
    ],
)
def test_a_place_that_is_not_clear_is_refused(
    names: tuple[str, ...], fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        place(names, **fields)


def test_we_are_found_by_what_a_name_resolves_to() -> None:
    names = ("alpha", "beta")
    facts = some_facts(resolved={"alpha": ("10.0.0.9",), "beta": ("10.0.0.1",)})
    assert hosts.place(ModeHosts(names), a_request(ips=names), facts) == (1, ())
    # Debian resolves a host's own name to 127.0.1.1.
    facts = some_facts(resolved={"alpha": ("127.0.1.1",), "beta": ()})
    assert hosts.place(ModeHosts(names), a_request(ips=names), facts) == (0, ())


def test_strangers_are_told_both_sides() -> None:
    names = ("10.0.0.8", "gone")
    facts = some_facts(resolved={"gone": ()})
    with pytest.raises(EnvironmentFault) as caught:
        hosts.place(ModeHosts(names), a_request(ips=names), facts)
    assert str(caught.value) == (
        "--ips=10.0.0.8,gone: none of them is this host, which has 10.0.0.1 (eth0). gone cannot "
        "be resolved. Run this on the hosts named, or say which one this is with --host."
    )
