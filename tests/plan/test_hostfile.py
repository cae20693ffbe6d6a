"""Lists and files of hosts are read as DeepSpeed and MPI read them; each error is one sentence."""

from __future__ import annotations

import pytest

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
        ("a slots=1 slots=2", r"^hosts:1: slots=1 slots=2: write one `NAME slots=N` a line"),
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
        ("a:2222", r"2222 is not a number of slots, 1 to 1024\. A port of sshd belongs in ~/\.ssh"),
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
