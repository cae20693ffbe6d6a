"""Jobs that go on while their hosts come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from meetings import Meeting
from waiting import LONG_S, patient, quick, until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.extended

# Notes its identity, and waits until it may end.
SPEAK = """
echo "rank $R speaks"
touch "../is.$PADDLE_RESTART_COUNT.$R.of.$PADDLE_TRAINERS_NUM"
until [ -e ../go ]; do sleep 0.02; done
"""
# Hosts that are there wait for all; or for no more.
PATIENT, HASTY = "--elastic_timeout=600", "--elastic_timeout=0.2"
WAITS = "This host waits for a place in the job"


def wait_for(folder: Path, generation: int, hosts: int) -> None:
    """Wait until all ranks of a GENERATION with HOSTS hosts have started."""
    names = [f"is.{generation}.{rank}.of.{hosts}" for rank in range(hosts)]
    until(lambda: all((folder / name).exists() for name in names))


def begin_with_a_spare(job: Meeting, waits: str = WAITS) -> subprocess.Popen[bytes]:
    """Start two hosts, and one more until it says that it WAITS; return the second launcher."""
    _, second = (job.start() for _ in range(2))
    wait_for(job.folder, 0, hosts=2)
    job.start()
    until(lambda: waits in job.output(2))
    return second


def test_an_elastic_job_goes_on_without_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Meeting(tmp_path, SPEAK, "--nnodes=1:3", *quick(), PATIENT)
    _, second, _ = (job.start("--rank", str(rank)) for rank in range(3))
    wait_for(tmp_path, 0, hosts=3)
    second.kill()
    wait_for(tmp_path, 1, hosts=2)
    (tmp_path / "go").touch()
    assert job.ends() == [0, -9, 0]
    assert "The job goes on with 2 hosts; this is host 1." in job.output(2)
    log = tmp_path / "host2" / "log" / "latest" / "workerlog.0.attempt1"
    assert log.exists()


def test_a_newcomer_makes_an_elastic_job_start_again_with_it(tmp_path: Path) -> None:
    job = Meeting(tmp_path, SPEAK, "--nnodes=1:2", *quick(), HASTY)
    job.start()
    wait_for(tmp_path, 0, hosts=1)
    job.start()
    wait_for(tmp_path, 1, hosts=2)
    (tmp_path / "go").touch()
    assert job.ends() == [0, 0]
    assert WAITS in job.output(1)
    # The second attempt of the job is the newcomer's first.
    log = tmp_path / "host1" / "log" / "latest" / "workerlog.0"
    assert log.read_text() == "rank 1 speaks\n"


def test_without_a_token_no_host_joins_a_job_that_has_begun(tmp_path: Path) -> None:
    # A host that is not there at the start is a stranger.
    wait = f"--elastic_timeout={patient(2.0):.1f}"
    job = Meeting(tmp_path, SPEAK, "--nnodes=1:2", *quick(), wait, token="")
    _, second = (job.start("--rank", str(rank)) for rank in range(2))
    wait_for(tmp_path, 0, hosts=2)
    assert "FLEETRUN_TOKEN is not set" in job.output(0)
    second.kill()
    wait_for(tmp_path, 1, hosts=1)
    # A caller with the script and its options, from an address that the job does not know.
    job.start().wait(LONG_S)
    assert "without FLEETRUN_TOKEN no other host can join it" in job.output(2)
    (tmp_path / "go").touch()
    assert job.ends() == [0, -9, 4]


def test_a_rank_that_ends_with_101_lets_all_start_again_without_max_restart(tmp_path: Path) -> None:
    script = SPEAK + "[ $PADDLE_RESTART_COUNT = 0 ] && exit 101 || exit 0\n"
    job = Meeting(tmp_path, script, "--nnodes=1:2", *quick(), HASTY)
    (tmp_path / "go").touch()
    job.start()
    assert job.ends() == [0]
    wait_for(tmp_path, 1, hosts=1)
    assert "exited with 101. All ranks start again" in job.output(0)


@pytest.mark.slow
def test_a_host_that_stands_by_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    job = Meeting(tmp_path, SPEAK, "--nnodes=2", "--spares=1", *quick())
    second = begin_with_a_spare(job)
    second.kill()
    wait_for(tmp_path, 1, hosts=2)
    (tmp_path / "go").touch()
    assert job.ends() == [0, -9, 0]
    assert "rank 1 of 2" in job.output(2)
