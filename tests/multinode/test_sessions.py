"""Jobs on four hosts of which one fails, vanishes, is cut off, comes late or never."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkout import environ
from waiting import LONG_S, patient, quick, until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Sequence

    from lab import Host, Network

pytestmark = pytest.mark.multinode

FIRST = "10.88.0.1"
# Notes its rank, waits for its exit code, and exits.
RANK = """
exec 3<>"orders.$PADDLE_TRAINER_ID"
echo "rank $PADDLE_TRAINER_ID of $PADDLE_TRAINERS_NUM speaks"
: >"ready.$PADDLE_TRAINER_ID"
read -r code <&3
exit "$code"
"""


class Job:
    """A job on HOSTS with one rank each, in one folder that they share."""

    # Whether they share the folder of their logs, too.
    has_one_log = False

    def __init__(self, hosts: Sequence[Host], *options: str, folder: Path) -> None:
        self.hosts = hosts
        self.options = options
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "rank.sh").write_text(RANK)
        for rank in range(4):
            os.mkfifo(folder / f"orders.{rank}")
        self.launchers: dict[Host, subprocess.Popen[bytes]] = {}

    def start(self, hosts: Iterable[Host] = (), *more: str, **env: str) -> None:
        """Start a launcher on HOSTS, or on all."""
        for host in hosts or self.hosts:
            log = self.folder / "log" if self.has_one_log else host.folder / "log"
            words = ("--nproc_per_node=1", f"--log_dir={log}", *self.options, *more)
            self.launchers[host] = host.fleetrun(*words, "sh", "rank.sh", folder=self.folder, **env)

    def begin(self) -> Job:
        """Start a launcher on all hosts, and wait until every rank runs."""
        self.start()
        self.wait_until_ready()
        return self

    def wait_until_ready(self) -> None:
        """Wait until every rank runs."""
        until(lambda: self._is_over() or self._is_ready())
        assert self._is_ready(), [host.output for host in self.launchers]

    def fail_once_and_end(self) -> None:
        """Let rank 1 fail; all ranks start again together, and succeed."""
        self.wait_until_ready()
        for ready in self.folder.glob("ready.*"):
            ready.unlink()
        self.order(1, 9)
        self.wait_until_ready()
        for rank in range(4):
            self.order(rank, 0)
        assert self.ends() == [0] * 4

    def _is_ready(self) -> bool:
        return all((self.folder / f"ready.{rank}").exists() for rank in range(4))

    def _is_over(self) -> bool:
        return any(launcher.poll() is not None for launcher in self.launchers.values())

    def order(self, rank: int, code: int) -> None:
        """Let RANK end with CODE."""
        fd = os.open(self.folder / f"orders.{rank}", os.O_RDWR)
        os.write(fd, b"%d\n" % code)
        os.close(fd)

    def ends(self, *gone: Host) -> list[int]:
        """Return the exit codes of the launchers, except those that are GONE."""
        here = [host for host in self.launchers if host not in gone]
        codes = [self.launchers[host].wait(LONG_S) for host in here]
        for host in gone:
            self.launchers[host].wait(LONG_S)
        for host in here:
            assert host.processes() == []
        return codes


def by_list(network: Network, folder: Path, *options: str) -> Job:
    ips = ",".join(host.ip for host in network.hosts)
    return Job(network.hosts, f"--ips={ips}", *quick(), *options, folder=folder)


def by_master(network: Network, folder: Path, *options: str) -> Job:
    where = (f"--master={FIRST}:6170", "--nnodes=4", *quick(), *options)
    return Job(network.hosts, *where, folder=folder)


@pytest.mark.parametrize("make", [by_list, by_master])
def test_all_hosts_end_as_the_rank_that_failed_first(
    make: Callable[..., Job], four_hosts: Network, tmp_path: Path
) -> None:
    job = make(four_hosts, tmp_path / "job").begin()
    job.order(2, 7)
    assert job.ends() == [7] * 4
    for host in four_hosts.hosts:
        assert "ank 2 exited with 7" in host.output
    # The last line of its log, whatever its host.
    assert all("rank 2 of 4 speaks" in host.output for host in four_hosts.hosts)


def test_hosts_that_meet_may_come_in_any_order_and_by_name(
    four_hosts: Network, tmp_path: Path
) -> None:
    """On node-1 its own name means 127.0.1.1, and on the others its address."""
    options = ("--master=node-1:6170", "--nnodes=4", *quick())
    job = Job(four_hosts.hosts, *options, folder=tmp_path / "job")
    for host in reversed(four_hosts.hosts):
        job.start([host])
    job.wait_until_ready()
    for rank in range(4):
        job.order(rank, 0)
    assert job.ends() == [0] * 4
    assert "FLEETRUN_TOKEN is not set" in four_hosts.hosts[1].output
    # The master's host is first; the others are sorted by address.
    for rank, host in enumerate(four_hosts.hosts):
        log = (host.folder / "log" / "workerlog.0").read_text()
        assert log == f"rank {rank} of 4 speaks\n"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_host_that_crashes_is_named_and_ends_the_job(
    victim: int, four_hosts: Network, tmp_path: Path
) -> None:
    job = by_list(four_hosts, tmp_path / "job").begin()
    gone = four_hosts.hosts[victim]
    gone.crash()
    codes = job.ends(gone)
    assert len(set(codes)) == 1
    assert codes[0] != 0
    for host in four_hosts.hosts:
        if host is not gone:
            assert gone.ip in host.output


def test_a_host_that_is_cut_off_ends_by_itself_and_is_named(
    four_hosts: Network, tmp_path: Path
) -> None:
    # A launcher that gets no processor for half of the timeout is lost for that reason, too.
    job = by_list(four_hosts, tmp_path / "job", *quick(5.0)).begin()
    alone = four_hosts.hosts[2]
    four_hosts.cut(alone)
    codes = job.ends()
    assert 0 not in codes
    for host in four_hosts.hosts:
        assert (alone.ip in host.output) or host is alone
    assert "cut off" in alone.output


def test_a_bad_network_is_survived(slow_hosts: Network, tmp_path: Path) -> None:
    slow_hosts.spoil(loss=5, delay_ms=20)
    job = by_list(slow_hosts, tmp_path / "job", *quick(10.0)).begin()
    slow_hosts.cut(slow_hosts.hosts[1])
    # Long enough to lose a second's heartbeats.
    slow_hosts.hosts[0].run("sleep", "3")
    slow_hosts.heal(slow_hosts.hosts[1])
    for rank in range(4):
        job.order(rank, 0)
    assert job.ends() == [0] * 4


def test_a_launcher_that_is_asked_to_stop_stops_the_job(
    four_hosts: Network, tmp_path: Path
) -> None:
    job = by_list(four_hosts, tmp_path / "job").begin()
    first = job.launchers[four_hosts.hosts[1]].pid
    children = Path(f"/proc/{first}/task/{first}/children").read_text()
    os.kill(int(children.split()[0]), signal.SIGTERM)
    assert job.ends() == [143] * 4


@pytest.mark.parametrize("make", [by_list, by_master])
def test_a_host_that_never_comes_is_waited_for_and_named(
    make: Callable[..., Job], four_hosts: Network, tmp_path: Path
) -> None:
    timeout_s = round(patient(2.0))
    job = make(four_hosts, tmp_path / "job", f"--rdzv_timeout={timeout_s}")
    job.start(four_hosts.hosts[:3])
    assert job.ends() == [4] * 3
    for host in four_hosts.hosts[:3]:
        assert f"did not come within {timeout_s} s" in host.output
        assert make is by_master or "10.88.0.4" in host.output
    assert not list((tmp_path / "job").glob("ready.*"))


def test_hosts_with_one_log_folder_keep_one_run_directory(
    four_hosts: Network, tmp_path: Path
) -> None:
    logs = ("workerlog", "workererr")
    options = ("--max_restart=1", "--log_keep=1", "--redirects=True")
    for _ in range(2):
        job = by_list(four_hosts, tmp_path / "job", *options)
        job.has_one_log = True
        job.start()
        job.fail_once_and_end()
        for fifo in (tmp_path / "job").glob("[or]*.?"):
            fifo.unlink()
    log = tmp_path / "job" / "log"
    (run,) = (log / "runs").iterdir()
    assert log.joinpath("latest").resolve() == run
    assert {name.name for name in log.iterdir()} == {
        *("runs", "latest", "endpoints.log"),
        *(f"{name}.{rank}" for rank in range(4) for name in logs),
    }
    for rank in range(4):
        assert all((run / f"{name}.{rank}.attempt1").is_file() for name in logs)
        for path in (run / f"workerlog.{rank}", log / f"workerlog.{rank}"):
            assert path.read_text() == f"rank {rank} of 4 speaks\n"
    command = (sys.executable, "-m", "fleetrun")
    for words in (("logs",), ("top", "--once")):
        shown = four_hosts.hosts[2].run(*command, *words, f"--log_dir={log}", env=environ())
        assert all(f"rank {rank}" in shown.stdout for rank in range(4)), shown.stdout
