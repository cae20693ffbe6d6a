"""A fault of one host before the start is reported on all hosts, and nothing starts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from lab import ends
from waiting import LONG_S

if TYPE_CHECKING:
    import subprocess

    from lab import Host, Network

pytestmark = pytest.mark.multinode

IPS = ("--ips=10.88.0.1,10.88.0.2",)
MASTER = ("--master=10.88.0.1:6170", "--nnodes=2")
# A host's options, what its shell does first, the message on all hosts, and the exit code.
FAULTS = {
    "no script": ((), "rm train.py", "There is no script train.py", 3),
    "no gpu": (("--gpus=0",), ":", "--gpus=0", 3),
    "no log folder": ((), "echo >log", "The logs cannot be written to", 3),
    "full disk": (
        (),
        "mkdir log && mount -t tmpfs -o size=64k tmpfs log && ! head -c 100k </dev/zero >log/x",
        "No space left on device",
        3,
    ),
    "few files": ((), "ulimit -n 28", "open files", 3),
}


def start(host: Host, *options: str, before: str = ":") -> subprocess.Popen[bytes]:
    """Start a launcher with two ranks on HOST after the shell commands BEFORE."""
    (host.folder / "train.py").write_text("open('up', 'w')\n")
    return host.fleetrun("--nproc_per_node=2", *options, "train.py", before=before)


# Each fault on the first host of one kind of job or on the second of the other, in turns.
PLACES = [
    pytest.param(fault, place, where, marks=() if number % 2 == at else pytest.mark.long)
    for number, fault in enumerate(FAULTS)
    for at, (place, where) in enumerate(((0, IPS), (1, MASTER)))
]


@pytest.mark.parametrize(("fault", "place", "where"), PLACES)
def test_what_cannot_start_on_one_host_starts_on_none(
    fault: str, place: int, where: tuple[str, ...], two_hosts: tuple[Host, Host]
) -> None:
    options, before, sentence, code = FAULTS[fault]
    launchers = [
        start(host, *where, "--max_restart=2", *options, before=before)
        if host is two_hosts[place]
        else start(host, *where, "--max_restart=2")
        for host in two_hosts
    ]
    assert ends(launchers) == [code, code]
    for host in two_hosts:
        assert sentence in host.output
        assert not (host.folder / "up").exists()
        assert not list(host.folder.glob("log/runs/*"))
    ill = two_hosts[place]
    assert re.search(rf"\(on ({ill.ip}|{ill.name})\)", two_hosts[1 - place].output)


@pytest.mark.parametrize("place", [0, 1])
def test_a_host_that_comes_after_the_fault_hears_of_it(place: int, four_hosts: Network) -> None:
    hosts = four_hosts.hosts[:3]
    ips = f"--ips={','.join(host.ip for host in hosts)}"
    launchers = [
        start(host, ips, before="rm train.py" if host is hosts[place] else ":")
        for host in hosts[:2]
    ]
    if place:
        # It ends once the coordinator knows, which itself waits for later hosts.
        assert launchers[1].wait(LONG_S) == 3
    launchers.append(start(hosts[2], ips))
    assert ends(launchers) == [3, 3, 3]
    for host in hosts:
        assert "There is no script train.py" in host.output


@pytest.mark.parametrize("fault", ["no script", "full disk"])
def test_an_elastic_job_goes_on_without_a_host_that_cannot_start(
    fault: str, four_hosts: Network
) -> None:
    options, before, sentence, code = FAULTS[fault]
    *well, ill, _ = four_hosts.hosts
    where = ("--master=10.88.0.1:6170", "--nnodes=2:3", "--elastic_timeout=5")
    launchers = [start(host, *where) for host in well]
    late = start(ill, *where, *options, before=before)
    assert late.wait(LONG_S) == code
    assert ends(launchers) == [0, 0]
    assert sentence in ill.output
    assert not (ill.folder / "up").exists()
    for host in well:
        assert (host.folder / "up").exists()
        assert sentence in host.output
