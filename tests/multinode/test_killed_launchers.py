"""Launchers that are killed or stopped, and their ranks: by TERM, in time, and told to the rest."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import LONG_S, until

if TYPE_CHECKING:
    import subprocess

    from lab import Host, Network

pytestmark = pytest.mark.multinode

ROOT = Path(__file__).parents[2]
# Notes when it was asked to end, and then takes its time.
SAVE = """
trap 'sleep 1; echo "saved by $PADDLE_TRAINER_ID" >>"$1"; exit' TERM
: >"up.$PADDLE_TRAINERS_NUM"
[ "$PADDLE_TRAINERS_NUM" != 1 ] || { cat "$1"; exit 0; }
while :; do sleep 0.01; done
"""


def start(host: Host, *options: str) -> subprocess.Popen[bytes]:
    """Start a launcher with one rank on HOST."""
    (host.folder / "rank.sh").write_text(SAVE)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    where = ("--master=10.88.0.1:6170", "--nproc_per_node=1", *options)
    script = ("sh", "rank.sh", str(host.folder.parent / "saved"))
    return host.start(sys.executable, "-m", "fleetrun", *where, *script, env=env)


def running(host: Host, what: str) -> list[int]:
    """Return the processes of HOST whose commands begin with WHAT, as that host numbers them."""
    shown = host.run("ps", "-e", "-o", "pid=,args=").stdout.splitlines()
    rows = [line.split(None, 1) for line in shown]
    return [int(pid) for pid, args in rows if args.startswith(what)]


def send(host: Host, signum: int) -> None:
    """Send SIGNUM to the launcher of HOST, which is the first of its processes."""
    launcher = min(running(host, f"{sys.executable} -m fleetrun"))
    host.run("kill", f"-{int(signum)}", str(launcher))


def said(host: Host) -> str:
    """Return what the launcher on HOST has said."""
    return (host.folder / "output").read_text()


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_end_and_the_ranks_may_save(
    victim: int, two_hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    launchers = [start(host, "--nnodes=2") for host in two_hosts]
    until(lambda: all((host.folder / "up.2").exists() for host in two_hosts))
    gone, other = two_hosts[victim], two_hosts[1 - victim]
    send(gone, signal.SIGKILL)
    assert launchers[1 - victim].wait(LONG_S) == 1
    launchers[victim].wait(LONG_S)
    until(lambda: not running(gone, "sh rank.sh"))
    assert "was lost on" in said(other)
    saved = (tmp_path / "saved").read_text().splitlines()
    assert sorted(saved) == ["saved by 0", "saved by 1"]


def test_the_next_start_comes_when_the_ranks_of_a_killed_launcher_have_ended(
    two_hosts: tuple[Host, Host],
) -> None:
    # So long that only the word of the guard can begin it.
    options = ("--nnodes=1:2", f"--heartbeat_timeout={2 * LONG_S}", "--elastic_timeout=5")
    launchers = [start(host, *options) for host in two_hosts]
    until(lambda: all((host.folder / "up.2").exists() for host in two_hosts))
    send(two_hosts[1], signal.SIGKILL)
    assert launchers[0].wait(LONG_S) == 0
    # The rank of the next start has seen what the ranks of both hosts have left.
    log = (two_hosts[0].folder / "log" / "workerlog.0").read_text()
    assert sorted(log.splitlines()) == ["saved by 0", "saved by 1"]
    launchers[1].wait(LONG_S)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_ranks_of_a_stopped_launcher_do_not_outlive_the_job(
    victim: int, four_hosts: Network
) -> None:
    hosts = four_hosts.hosts[:2]
    launchers = [start(host, "--nnodes=2", "--heartbeat_timeout=4") for host in hosts]
    until(lambda: all((host.folder / "up.2").exists() for host in hosts))
    stopped = hosts[victim]
    send(stopped, signal.SIGSTOP)
    assert launchers[1 - victim].wait(LONG_S) == 1
    until(lambda: not running(stopped, "sh rank.sh"))
    # nsenter has stopped with it.
    launchers[victim].send_signal(signal.SIGCONT)
    assert launchers[victim].wait(LONG_S) != 0
