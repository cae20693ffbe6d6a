"""Killed and stopped launchers: their ranks get TERM, end in time, and the others are told."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING

import pytest
import sshd
from checkout import ROOT
from waiting import LONG_S, patient, until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from lab import Host, Network

pytestmark = pytest.mark.multinode

SHELL = shutil.which("sh") or ""
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
SUPERVISOR = "rank-supervisor"
# Longer than any test waits.
ENDLESS_S = 2 * LONG_S
# Notes when it runs; the second attempt of an elastic job succeeds.
RANK = """
trap "$TRAP" TERM
: >"up.$PADDLE_TRAINERS_NUM"
while read -r now _ </proc/uptime && echo "$now" >>"../alive.$PADDLE_TRAINERS_NUM"; do
    [ "$PADDLE_TRAINERS_NUM" != 1 ] || exit 0
    sleep 0.02
done
"""
SAVES = 'sleep 0.5; echo "saved by $PADDLE_TRAINER_ID" >>../saved; exit'


def start(
    host: Host, *options: str, heartbeat_s: float, trap: str = SAVES
) -> subprocess.Popen[bytes]:
    """Start a launcher on HOST with one rank, which runs TRAP on TERM."""
    (host.folder / "rank.sh").write_text(RANK)
    where = ("--master=10.88.0.1:6170", "--nproc_per_node=1", *options)
    # A launcher that gets no processor for so long is lost, too.
    words = (*where, f"--heartbeat_timeout={patient(heartbeat_s):.1f}", SHELL, "rank.sh")
    return host.fleetrun(*words, TRAP=trap)


def running(host: Host, what: str) -> list[int]:
    """Return the processes of HOST whose commands begin with WHAT, as that host numbers them."""
    shown = host.run("ps", "-ww", "-e", "-o", "pid=,args=").stdout.splitlines()
    rows = [line.split(None, 1) for line in shown]
    return [int(pid) for pid, args in rows if args.startswith(what)]


def send(host: Host, signum: int, what: str = f"{sys.executable} -m fleetrun") -> None:
    """Send SIGNUM to the launcher of HOST, the first of its processes that are WHAT.

    Stopped is its supervisor, which alone holds the connections.
    """
    what = SUPERVISOR if signum == STOP else what
    host.run("kill", f"-{int(signum)}", str(min(running(host, what))))


def are_up(*hosts: Host) -> bool:
    """Whether all ranks run."""
    return all((host.folder / "up.2").exists() for host in hosts)


@pytest.mark.parametrize(("victim", "heartbeat_s"), [(0, ENDLESS_S), (1, 10.0)])
def test_the_others_end_and_the_ranks_may_save(
    victim: int, heartbeat_s: float, two_hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    options = ("--nnodes=2", "--max_restart=1")
    launchers = [start(host, *options, heartbeat_s=heartbeat_s) for host in two_hosts]
    until(lambda: are_up(*two_hosts))
    gone, other = two_hosts[victim], two_hosts[1 - victim]
    send(gone, KILL)
    assert launchers[1 - victim].wait(LONG_S) == 128 + KILL
    launchers[victim].wait(LONG_S)
    until(lambda: not running(gone, SHELL))
    assert "Interrupted by SIGKILL on" in other.output
    # Nobody would take the place of a launcher that was killed.
    assert "start again" not in other.output
    saved = (tmp_path / "saved").read_text().splitlines()
    assert sorted(saved) == ["saved by 0", "saved by 1"]


@pytest.mark.parametrize(
    ("signum", "heartbeat_s", "trap"),
    [
        # Only the supervisor's message can start the next attempt.
        (KILL, ENDLESS_S, SAVES),
        (KILL, 3.0, ""),
        # The keeper kills ranks that would outlive the deadline.
        (STOP, 3.0, ""),
        pytest.param(STOP, 10.0, SAVES, marks=pytest.mark.long),
    ],
)
def test_the_next_start_comes_when_the_ranks_of_a_lost_launcher_have_ended(
    signum: int, heartbeat_s: float, trap: str, two_hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    options = ("--nnodes=1:2", "--elastic_timeout=5", "--grace=2" if trap else "--grace=8")
    first, second = (
        start(host, *options, heartbeat_s=heartbeat_s, trap=trap if host is two_hosts[1] else SAVES)
        for host in two_hosts
    )
    until(lambda: are_up(*two_hosts))
    send(two_hosts[1], signum)
    assert first.wait(LONG_S) == 0
    last = (tmp_path / "alive.2").read_text().splitlines()[-1]
    assert float(last) <= float((tmp_path / "alive.1").read_text().splitlines()[0])
    assert not running(two_hosts[1], SHELL)
    if signum == STOP:
        send(two_hosts[1], signal.SIGCONT, SUPERVISOR)
    assert second.wait(LONG_S) != 0


@pytest.mark.parametrize(("victim", "heartbeat_s"), [(0, 3.0), (1, 6.0)])
def test_the_ranks_of_a_stopped_launcher_do_not_outlive_the_job(
    victim: int, heartbeat_s: float, two_hosts: tuple[Host, Host]
) -> None:
    launchers = [start(host, "--nnodes=2", heartbeat_s=heartbeat_s) for host in two_hosts]
    until(lambda: are_up(*two_hosts))
    stopped = two_hosts[victim]
    send(stopped, STOP)
    assert launchers[1 - victim].wait(LONG_S) == 1
    until(lambda: not running(stopped, SHELL))
    send(stopped, signal.SIGCONT, SUPERVISOR)
    assert launchers[victim].wait(LONG_S) != 0
    # The others had only given up a coordinator that stood still.
    assert victim or "was stopped or without a processor" in stopped.output


@pytest.mark.skipif(not sshd.SSHD, reason="there is no sshd here")
@pytest.mark.parametrize(
    ("victim", "signum"),
    # A stopped supervisor keeps the user's ssh for half a minute.
    [(0, KILL), pytest.param(1, STOP, marks=pytest.mark.long)],
)
def test_nobody_survives_by_ssh(
    victim: int, signum: int, four_hosts: Network, tmp_path: Path
) -> None:
    head, *hosts = four_hosts.hosts[:3]
    shown = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ssh = sshd.on_hosts(hosts, tmp_path / "keys", **shown, TRAP="exit")
    (head.folder / "rank.sh").write_text(RANK)
    options = ("--hosts=10.88.0.2:1,10.88.0.3:1", f"--ssh=ssh -F {ssh}", "--grace=1")
    heartbeat = f"--heartbeat_timeout={patient(3.0):.1f}"
    words = ("-m", "fleetrun", *options, heartbeat, SHELL, "rank.sh")
    job = head.start(sys.executable, *words, env={**os.environ, **shown})
    until(lambda: all(running(host, SHELL) for host in hosts))
    send(hosts[victim], signum, f"{sys.executable} {ROOT / 'fleetrun' / '__main__.py'}")
    until(lambda: not any(running(host, SHELL) for host in hosts))
    # The killed launcher's own failure may come first.
    assert job.wait(LONG_S) in {1, 128 + KILL}
    until(lambda: not any(running(host, "fleetrun ") for host in hosts))
