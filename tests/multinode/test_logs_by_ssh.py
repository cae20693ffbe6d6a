"""`--gather_logs` of a job by ssh: the logs of all hosts end up where it was started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sshd
from checkout import ROOT
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
    head, *hosts = four_hosts.hosts[:3]
    work = tmp_path / "work"
    work.mkdir()
    # The ranks' files stay on their hosts.
    for host in hosts:
        host.run("mount", "-t", "tmpfs", "tmpfs", str(work))
    shown = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", MARKER: marker}
    ssh = sshd.option(hosts, tmp_path / "keys", **shown)
    ips = ",".join(f"{host.ip}:2" for host in hosts)
    script = (
        'echo "rank $PADDLE_TRAINER_ID on $(hostname)"; '
        f'[ "$PADDLE_TRAINER_ID" != 3 ] || exit {code}; [ {code} = 0 ] || sleep 1000'
    )
    options = (f"--hosts={ips}", ssh, "--gather_logs=all")
    job = head.fleetrun(*options, "sh", "-c", script, folder=work, **shown)
    assert job.wait(LONG_S) == code, head.output
    assert_no_survivors(marker)
    assert "fleetrun: The logs are in log/runs/" in head.output
    for rank in range(4):
        text = (work / "log" / f"workerlog.{rank}").read_text()
        assert text == f"rank {rank} on node-{2 + rank // 2}\n"
    assert (work / "log" / "latest" / "hosts.json").exists()
