"""Hosts of one job with different options: the coordinator's options hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from lab import ends
from waiting import until

if TYPE_CHECKING:
    import subprocess

    from lab import Host, Network

pytestmark = pytest.mark.multinode

MASTER = ("--master=10.88.0.1:6170", "--grace=1")


def start(host: Host, script: str, *options: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start a launcher with one rank, which runs the shell's SCRIPT, on HOST."""
    (host.folder / "rank.sh").write_text(script)
    return host.fleetrun(
        "--nproc_per_node=1", *options, "sh", "rank.sh", folder=host.folder, **variables
    )


def ranks(host: Host) -> list[str]:
    """Return the ranks that run on HOST."""
    return [line for line in host.processes() if line.startswith("sh rank.sh")]


def test_two_parts_of_a_job_never_train_at_once(four_hosts: Network) -> None:
    first, second, *_ = four_hosts.hosts
    wait = ": >up.$PADDLE_TRAINERS_NUM; until [ -e done ]; do sleep 0.05; done"
    options = (*MASTER, "--nnodes=1:2", "--elastic_timeout=2")
    launchers = [
        start(first, wait, *options, "--heartbeat_timeout=4"),
        start(second, wait, *options, "--heartbeat_timeout=60"),
    ]
    until((second.folder / "up.2").exists)
    four_hosts.cut(second)
    until((first.folder / "up.1").exists)
    assert ranks(second) == []
    four_hosts.heal(second)
    assert "and timeouts apply, which differ from those here" in second.output
    (first.folder / "done").touch()
    assert ends(launchers) == [0, 1]


def test_a_job_starts_again_as_often_as_its_coordinator_says(
    two_hosts: tuple[Host, Host],
) -> None:
    first, second = two_hosts
    options = (*MASTER, "--nnodes=2")
    # This waits for the other rank, too: the first restart has no delay.
    up = "up.$PADDLE_RESTART_COUNT"
    fail = f": >{up}; [ $PADDLE_TRAINER_ID = 0 ] || exec sleep 600; "
    fail += f"until [ -e {second.folder}/{up} ]; do sleep 0.05; done; exit 7"
    launchers = [
        start(first, fail, *options, "--max_restart=1"),
        start(second, fail, *options, "--grace=60"),
    ]
    assert ends(launchers) == [7, 7]
    assert (second.folder / "up.1").exists()
    assert "Restart 1 of 1" in second.output
    assert "and timeouts apply, which differ from those here" in second.output
    assert "differ from those here" not in first.output
