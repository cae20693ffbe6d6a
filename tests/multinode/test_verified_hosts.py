"""`fleetrun verify` of jobs on two hosts: by ssh, and typed on both of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sshd
from checkout import ROOT
from lab import ends
from processes import MARKER, assert_no_survivors
from snapshot_script import SCRIPT
from waiting import TRAINING_S

if TYPE_CHECKING:
    from pathlib import Path

    from lab import Host

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

VERIFY = ("verify", "--updates=8", "--strategy=comm_fusion")
# Plain Paddle and the strategy; where they differ, plain Paddle twice more, once moved by rounding.
RUNS = 4
# By the script's behaviour: the exit code, the message, and the number of runs.
CASES = {
    "equal": (0, "plain Paddle to the last bit, on 4 ranks.", 2),
    # The first rank that differs is on the second host.
    "second host": (0, "plain Paddle within rounding, on 4 ranks.", RUNS),
    # This rank is on the second host, whose report names it.
    "fails there": (
        5,
        "with comm_fusion rank 2 exited with 1 on 10.88.0.2: AssertionError: alas",
        2,
    ),
}


def runs(folder: Path) -> int:
    """Return how many runs the verification in FOLDER has made."""
    return len([*(folder / "verify" / "runs").iterdir()])


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_all_hosts_are_compared(
    two_hosts: tuple[Host, Host], tmp_path: Path, marker: str, case: str
) -> None:
    code, sentence, count = CASES[case]
    shown = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", MARKER: marker}
    ssh = sshd.option(two_hosts, tmp_path / "keys", **shown)
    (tmp_path / "train.py").write_text(SCRIPT)
    hosts = f"--hosts={','.join(f'{host.ip}:2' for host in two_hosts)}"
    words = (*VERIFY, hosts, ssh, "train.py", case)
    head = two_hosts[0].fleetrun(*words, folder=tmp_path, **shown)
    assert head.wait(TRAINING_S) == code, two_hosts[0].output
    assert sentence in two_hosts[0].output
    assert runs(tmp_path) == count
    assert_no_survivors(marker)


def test_snapshots_that_stay_on_another_host_are_missed(
    two_hosts: tuple[Host, Host], tmp_path: Path, marker: str
) -> None:
    shown = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", MARKER: marker}
    ssh = sshd.option(two_hosts, tmp_path / "keys", **shown)
    work = tmp_path / "work"
    work.mkdir()
    two_hosts[1].run("mount", "-t", "tmpfs", "tmpfs", str(work))
    for host in two_hosts:
        host.run("sh", "-c", 'echo "$1" >"$2"', "sh", SCRIPT, str(work / "train.py"))
    hosts = f"--hosts={','.join(f'{host.ip}:2' for host in two_hosts)}"
    words = (*VERIFY, hosts, ssh, "train.py", "equal")
    head = two_hosts[0].fleetrun(*words, folder=work, **shown)
    assert head.wait(TRAINING_S) == 1, two_hosts[0].output
    assert "give an --out that is one folder on all hosts" in two_hosts[0].output
    assert_no_survivors(marker)


def test_a_difference_on_one_of_two_hosts_holds_up_none(two_hosts: tuple[Host, Host]) -> None:
    for host in two_hosts:
        (host.folder / "train.py").write_text(SCRIPT)
    words = (*VERIFY, "--nnodes=2", "--master=node-1:6170", "--nproc_per_node=2")
    started = [host.fleetrun(*words, "train.py", "second host") for host in two_hosts]
    output = "\n".join(host.output for host in two_hosts)
    assert ends(started, TRAINING_S) == [0, 0], output
    for host, how in zip(two_hosts, ("to the last bit", "within rounding"), strict=True):
        assert f"{how}, on 2 of 4 ranks." in host.output
        assert runs(host.folder) == RUNS
        assert host.processes() == []
