"""`--ship` to hosts without fleetrun and the folder: nothing stays, whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import sshd_hosts
from checkout import ROOT, environ
from processes import MARKER, assert_no_survivors, survivors
from terminals import stat_of
from waiting import LONG_S, until

from fleetrun.remote import protocol

if TYPE_CHECKING:
    from pathlib import Path

    from lab import Network

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.long]

SCRIPT = """\
echo "rank $PADDLE_TRAINER_ID has $(cat data) and $1"
touch up.$PADDLE_TRAINER_ID
until [ -e go ]; do sleep 0.1; done
exit 5
"""


@pytest.mark.parametrize("killed", ["", "head", "agent", "ssh"])
def test_nothing_that_was_sent_stays_on_a_host(
    four_hosts: Network, tmp_path: Path, marker: str, killed: str
) -> None:
    head, *hosts = four_hosts.hosts[:3]
    work, there = tmp_path / "work", tmp_path / "there"
    for folder in (work, there):
        folder.mkdir()
    (work / "train.sh").write_text(SCRIPT)
    (work / "data").write_text("data")
    for host in hosts:
        # The hosts have neither the checkout with its Python nor the job.
        for folder in (ROOT, work):
            host.run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    shown = {"CUDA_VISIBLE_DEVICES": "", MARKER: marker}
    ssh = sshd_hosts.option(hosts, tmp_path / "keys", TMPDIR=str(there), **shown)
    ips = ",".join(host.ip for host in hosts)
    options = (f"--hosts={ips}", ssh, "--ship", "--nproc_per_node=1")
    words = [sys.executable, "-m", "fleetrun", *options, "sh", "train.sh", "a b"]
    with subprocess.Popen(
        head.command(words, cwd=work),
        env=environ(**shown),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until(lambda: process.poll() is not None or len([*there.glob("*/job/up.*")]) == 2)
        processes = survivors(marker)
        if killed == "head":
            # The nsenter of that host is spared.
            strike(
                [
                    pid
                    for pid, line in processes.items()
                    if line.startswith(sys.executable) and "--ship" in line
                ]
            )
        elif killed == "agent":
            # Its child cleans up.
            agents = [pid for pid, line in processes.items() if protocol.RECEIVE in line]
            strike([pid for pid in agents if int(stat_of(pid)[1]) not in agents][:1])
        elif killed == "ssh":
            strike([pid for pid, line in processes.items() if line.startswith("ssh ")][:1])
        else:
            next(there.glob("*/job")).joinpath("go").touch()
        out, err = process.communicate(timeout=LONG_S)
    assert_no_survivors(marker)
    until(lambda: not list(there.iterdir()))
    if not killed:
        assert (process.returncode, out) == (5, "rank 0 has data and a b\n"), err
        assert (work / "log" / "workerlog.1").read_text() == "rank 1 has data and a b\n"


def strike(pids: list[int]) -> None:
    """Kill PIDS, of which there is at least one."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_host_without_fleetrun_is_told_of_ship(four_hosts: Network, tmp_path: Path) -> None:
    head, host, *_ = four_hosts.hosts
    host.run("mount", "-t", "tmpfs", "tmpfs", str(ROOT))
    ssh = sshd_hosts.option([host], tmp_path / "keys", CUDA_VISIBLE_DEVICES="")
    job = head.fleetrun(f"--hosts={host.ip}", ssh, "true", folder=tmp_path)
    assert job.wait(LONG_S) == 3
    assert f"fleetrun: {host.ip}  there is no {sys.executable} there (" in head.output
    assert "or send it along with --ship." in head.output
