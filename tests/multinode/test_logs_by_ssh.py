"""`--gather_logs` of a job by ssh: the logs of all hosts end up where it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import sshd_hosts
from commandline import ROOT
from processes import MARKER, assert_no_survivors
from waiting import LONG_S

if TYPE_CHECKING:
    from pathlib import Path

    from lab import Network

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("code", [0, 2])
def test_logs_of_hosts_with_folders_of_their_own_are_fetched(
    four_hosts: Network, tmp_path: Path, marker: str, code: int
) -> None:
    if not sshd_hosts.SSHD:
        pytest.skip("there is no sshd here (Debian: apt install openssh-server)")
    head, *hosts = four_hosts.hosts[:3]
    work = tmp_path / "work"
    work.mkdir()
    # What ranks write stays on their hosts.
    for host in hosts:
        host.run("mount", "-t", "tmpfs", "tmpfs", str(work))
    shown = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", MARKER: marker}
    config = sshd_hosts.on_hosts(hosts, tmp_path / "keys", **shown)
    ips = ",".join(f"{host.ip}:2" for host in hosts)
    script = (
        'echo "rank $PADDLE_TRAINER_ID on $(hostname)"; '
        f'[ "$PADDLE_TRAINER_ID" != 3 ] || exit {code}; [ {code} = 0 ] || sleep 1000'
    )
    options = (f"--hosts={ips}", f"--ssh=ssh -F {config}", "--gather_logs=all")
    command = [sys.executable, "-m", "fleetrun", *options, "sh", "-c", script]
    done = subprocess.run(
        head.command(command, cwd=work),
        env={**os.environ, **shown},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
    )
    assert_no_survivors(marker, LONG_S)
    assert done.returncode == code, done.stderr
    assert "fleetrun: The logs are in log/runs/" in done.stderr
    for rank in range(4):
        said = (work / "log" / f"workerlog.{rank}").read_text()
        assert said == f"rank {rank} on node-{2 + rank // 2}\n"
    assert (work / "log" / "latest" / "hosts.json").exists()
