"""Jobs whose roster is kept in etcd, and whose coordinator's host is lost."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import etcds
import pytest
from waiting import LONG_S, quick, until

from fleetrun.rundir.variables import TOKEN

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from lab import Host, Network

    Etcd: TypeAlias = Callable[[Sequence[Host]], str]

pytestmark = pytest.mark.multinode

# Notes its identity, and waits until it may end.
SPEAK = """
echo "rank $PADDLE_TRAINER_ID of $PADDLE_TRAINERS_NUM"
: >"is.$PADDLE_RESTART_COUNT.$PADDLE_TRAINER_ID.of.$PADDLE_TRAINERS_NUM.$(hostname)"
until [ -e go ]; do sleep 0.05; done
"""
COORDINATES = "This host coordinates the job from now on"
PATIENT = "--elastic_timeout=600"


class Job:
    """A job with one rank on each host, in one folder; its coordinator is on the first one."""

    def __init__(self, folder: Path, master: str, *options: str) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "rank.sh").write_text(SPEAK)
        master = f"--master={master}"
        self.options = ("--nproc_per_node=1", master, *quick(), PATIENT, *options)
        self.launchers: dict[Host, subprocess.Popen[bytes]] = {}

    def start(self, hosts: Sequence[Host]) -> None:
        """Start a launcher on each of HOSTS, and wait until the first one coordinates."""
        for host in hosts:
            log = f"--log_dir={host.folder / 'log'}"
            # Without a token, a host that was cut off could not join again.
            self.launchers[host] = host.fleetrun(
                log, *self.options, "sh", "rank.sh", folder=self.folder, **{TOKEN: "of the test"}
            )
            if len(self.launchers) == 1:
                until(lambda h=host: self._listens(h))  # type: ignore[misc]

    @staticmethod
    def _listens(host: Host) -> bool:
        # 0A is LISTEN; 1816 is 6166.
        lines = host.run("cat", "/proc/net/tcp").stdout.splitlines()
        return any(line.split()[1].endswith(":1816") and " 0A " in line for line in lines[1:])

    def wait_for(self, attempt: int, hosts: int) -> list[str]:
        """Wait until HOSTS ranks of ATTEMPT or a later one have started; return their hosts."""

        def spoken() -> list[str]:
            names = [path.name.split(".") for path in self.folder.glob(f"is.*.of.{hosts}.*")]
            # A slow host may have caused another attempt.
            for number in {int(name[1]) for name in names}:
                hostnames = [name[-1] for name in names if int(name[1]) == number]
                if number >= attempt and len(hostnames) == hosts:
                    return sorted(hostnames)
            return []

        until(lambda: spoken() or self._all_over())
        assert spoken(), [host.output for host in self.launchers]
        return spoken()

    def _all_over(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers.values())

    def let_go(self) -> None:
        """Let all ranks succeed."""
        (self.folder / "go").touch()

    def signal(self, host: Host, signum: int) -> None:
        """Send a signal to the launcher of HOST."""
        entered = self.launchers[host].pid
        children = Path(f"/proc/{entered}/task/{entered}/children").read_text()
        os.kill(int(children.split()[0]), signum)

    def end(self, host: Host) -> int:
        """Wait for the launcher of HOST, and return its exit code; no process may be left."""
        code = self.launchers[host].wait(LONG_S)
        if code == -signal.SIGKILL:
            return code
        assert not [line for line in host.processes() if "etcd --name" not in line]
        return code


def begun(network: Network, etcd: Etcd, folder: Path, *options: str) -> tuple[Job, list[Host]]:
    """Return a job whose ranks run on the first three hosts of NETWORK, and those hosts."""
    *hosts, keeper = network.hosts
    job = Job(folder / "job", etcd([keeper]), *options)
    job.start(hosts)
    assert job.wait_for(0, 3) == ["node-1", "node-2", "node-3"]
    return job, hosts


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    """Return a function that starts an etcd on some hosts, and returns the value of --master."""
    reason = etcds.missing()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda hosts: stack.enter_context(etcds.on_hosts(hosts))


def test_an_elastic_job_goes_on_without_the_first_host(
    four_hosts: Network, etcd: Etcd, tmp_path: Path
) -> None:
    *hosts, keeper = four_hosts.hosts
    master = etcd([keeper])
    # Paddle's options for the same.
    theirs = (f"--elastic_server={master.removeprefix('etcd://')}", "--np=1:3")
    job = Job(tmp_path / "job", master, *theirs)
    job.start(hosts)
    assert job.wait_for(0, 3) == ["node-1", "node-2", "node-3"]
    job.signal(hosts[0], signal.SIGKILL)
    assert job.wait_for(1, 2) == ["node-2", "node-3"]
    job.let_go()
    assert [job.end(host) for host in hosts] == [-signal.SIGKILL, 0, 0]
    outputs = [host.output for host in hosts[1:]]
    assert all("The job goes on with 2 hosts" in text for text in outputs)
    # One of them has coordinated it since then.
    assert any(COORDINATES in text for text in outputs)


@pytest.mark.slow
@pytest.mark.long
def test_who_is_cut_off_with_a_member_of_etcd_ends_its_ranks_first(
    four_hosts: Network, etcd: Etcd, tmp_path: Path
) -> None:
    hosts = four_hosts.hosts
    first = hosts[0]
    job = Job(tmp_path / "job", etcd(hosts[:3]), "--nnodes=2:4", "--rdzv_timeout=10")
    job.options = (*job.options, "--elastic_timeout=5")
    job.start(hosts)
    job.wait_for(0, 4)
    four_hosts.cut(first)
    until(lambda: "rank.sh" not in " ".join(first.processes()).partition("fleetrun")[0])
    assert job.wait_for(1, 3) == ["node-2", "node-3", "node-4"]
    ranks = [line for line in first.processes() if line.startswith("sh rank.sh")]
    assert not ranks
    job.let_go()
    assert [job.end(host) for host in hosts[1:]] == [0, 0, 0]
    four_hosts.heal(first)
    assert job.end(first) != 0
    assert "no longer coordinates the job: etcd has not answered" in first.output


def test_a_coordinator_whose_launcher_is_killed_is_followed_before_its_lease_ends(
    four_hosts: Network, etcd: Etcd, tmp_path: Path
) -> None:
    # This is longer than the test waits.
    job, hosts = begun(four_hosts, etcd, tmp_path, "--nnodes=2:3", "--heartbeat_timeout=1000")
    job.signal(hosts[0], signal.SIGKILL)
    assert job.wait_for(1, 2) == ["node-2", "node-3"]
    job.let_go()
    assert [job.end(host) for host in hosts] == [-signal.SIGKILL, 0, 0]
    assert not [line for line in hosts[0].processes() if "etcd --name" not in line]
    for host in hosts[1:]:
        assert "The job goes on with 2 hosts" in host.output


@pytest.mark.slow
@pytest.mark.long
def test_a_first_host_that_is_asked_to_end_leaves_the_job_to_the_others(
    four_hosts: Network, etcd: Etcd, tmp_path: Path
) -> None:
    job, hosts = begun(four_hosts, etcd, tmp_path, "--nnodes=1:3")
    job.signal(hosts[0], signal.SIGTERM)
    assert job.wait_for(1, 2) == ["node-2", "node-3"]
    job.let_go()
    assert [job.end(host) for host in hosts] == [128 + signal.SIGTERM, 0, 0]


def test_a_host_keeps_its_run_directory_when_a_new_coordinator_orders_the_hosts(
    four_hosts: Network, etcd: Etcd, tmp_path: Path
) -> None:
    first, second, third, keeper = four_hosts.hosts
    job = Job(tmp_path / "job", etcd([keeper]), "--nnodes=2", "--max_restart=1")
    job.start([first, second])
    assert job.wait_for(0, 2) == ["node-1", "node-2"]
    first.crash()
    until(lambda: COORDINATES in second.output)
    job.start([third])
    assert job.wait_for(1, 2) == ["node-2", "node-3"]
    job.let_go()
    assert [job.end(host) for host in (second, third)] == [0, 0]
    # It was rank 1, whose output is in a folder of that name.
    assert "rank 0 of 2" in second.output
