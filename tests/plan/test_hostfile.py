"""Lists and files of hosts are read as DeepSpeed and MPI read them; each error is one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.errors import UsageError
from fleetrun.plan import hostfile
from fleetrun.plan.hostfile import HostEntry

TEXT = """\
# the rack at the window
worker-0 slots=4   # the old one

10.0.0.7  slots=4
me@worker-2   slots=4
"""
HOSTS = (HostEntry("worker-0", 4), HostEntry("10.0.0.7", 4), HostEntry("me@worker-2", 4))


def test_thousands_of_hosts_are_read_and_one_twice_is_found_among_them() -> None:
    lines = [f"node{number}" for number in range(5000)]
    assert len(hostfile.read("\n".join(lines), "hosts")) == len(lines)
    with pytest.raises(UsageError, match="hosts:5001: node7 is named twice"):
        hostfile.read("\n".join((*lines, "node7")), "hosts")


def test_a_file_lists_a_host_a_line() -> None:
    assert hostfile.read(TEXT, "hosts") == HOSTS
    assert hostfile.read("a\nb", "hosts") == (HostEntry("a"), HostEntry("b"))
    assert HOSTS[2].name == "worker-2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=4\nb slots=four\n", r"^hosts:2: four is not a number of slots"),
        ("a slots=0", r"^hosts:1: 0 is not a number of slots"),
        ("a slots=", r"^hosts:1: nothing is not a number of slots"),
        ("a slots=99999", r"^hosts:1: 99999 is not a number of slots"),
        ("a slots=1 slots=2", r"^hosts:1: slots=2: write one `NAME slots=N` a line"),
        ("\na max_slots=4", r"^hosts:2: max_slots=4: write one"),
        ("a 4", r"^hosts:1: 4: write one"),
        ("a slots=1\n# b\na slots=1", r"^hosts:3: a is named twice"),
        ("me@a\na", r"^hosts:2: a is named twice"),
        ("-oProxyCommand=x slots=1", r"^hosts:1: -oProxyCommand=x is not a host name"),
        ("a;reboot slots=1", r"^hosts:1: a;reboot is not a host name"),
        ("@a", r"^hosts:1: @a is not a host name"),
        ("a\nfd00::2 slots=2", r"^hosts:2: Paddle reads no IPv6; give each host's name or IPv4"),
        ("me@[fd00::2]", r"^hosts:1: Paddle reads no IPv6"),
        ("# nobody\n", r"^hosts: no host is in this file"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hostfile.read(text, "hosts")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:8,,b:8", r"--hosts=a:8,,b:8: an empty name is not a host name"),
        ("a:x", r"--hosts=a:x: x is not a number of slots"),
        ("a:8,a:8", r"--hosts=a:8,a:8: a is named twice"),
        ("a:8:9", r"--hosts=a:8:9: 8:9 is not a number of slots"),
        ("", r"--hosts=: an empty name is not a host name"),
        ("a:8,fd00::2:8", r"--hosts=a:8,fd00::2:8: Paddle reads no IPv6"),
        ("[fd00::2]:8", r"--hosts=\[fd00::2\]:8: Paddle reads no IPv6"),
    ],
)
def test_a_bad_list_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hostfile.parse(text)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, HOSTS),
        ("worker-0", None, HOSTS[:1]),
        ("worker-2@worker-0", None, (HOSTS[0], HOSTS[2])),
        ("worker-0:0,2", None, (HostEntry("worker-0", 2, (0, 2)),)),
        (None, "10.0.0.7", (HOSTS[0], HOSTS[2])),
        (None, "worker-2:0", (*HOSTS[:2], HostEntry("me@worker-2", 3, (1, 2, 3)))),
        (None, "worker-2:0,1,2,3", HOSTS[:2]),
    ],
)
def test_some_are_chosen_as_in_deepspeed(
    include: str | None, exclude: str | None, left: tuple[HostEntry, ...]
) -> None:
    assert hostfile.chosen(HOSTS, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", r"give one of them"),
        ("worker-9", None, r"--include=worker-9: worker-9 is not one of the hosts listed"),
        ("worker-0@worker-0", None, r"names worker-0 twice"),
        ("worker-0:", None, r"write HOST or HOST:0,2"),
        ("worker-0:4", None, r"worker-0 has 4 slots, 0-3, and not 4"),
        (None, "worker-0@10.0.0.7@worker-2", r"leaves no host"),
    ],
)
def test_a_bad_choice_is_one_sentence(
    include: str | None, exclude: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        hostfile.chosen(HOSTS, include, exclude)


def test_devices_of_an_unknown_number_cannot_be_left_out() -> None:
    with pytest.raises(UsageError, match=r"a has no number of slots"):
        hostfile.chosen((HostEntry("a"), HostEntry("b")), None, "a:0")


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9.-]{0,8}[a-z]", fullmatch=True), st.integers(1, 64), min_size=1
    )
)
def test_what_is_written_is_read(hosts: dict[str, int]) -> None:
    lines = "\n".join(f"{name}\tslots={slots} #" for name, slots in hosts.items())
    listed = ",".join(f"{name}:{slots}" for name, slots in hosts.items())
    expected = tuple(HostEntry(name, slots) for name, slots in hosts.items())
    assert hostfile.read(lines, "hosts") == hostfile.parse(listed) == expected


@given(st.text("ab:,@ 1=#slot\n-", max_size=20))
def test_any_text_is_hosts_or_one_sentence(text: str) -> None:
    for read in (hostfile.parse, lambda text: hostfile.read(text, "hosts")):
        try:
            hosts = read(text)
        except UsageError:
            continue
        assert len({host.name for host in hosts}) == len(hosts) > 0
