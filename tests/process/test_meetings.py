"""Launchers of one job that meet at --master."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from commandline import FLEETRUN, Command
from meetings import Meeting
from terminals import state
from waiting import until

from fleetrun.run.events import STRATEGY_REJECTED

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended


def test_ctrl_z_does_not_stop_a_launcher_for_which_others_wait(tmp_path: Path) -> None:
    job = Meeting(tmp_path, "exit 0", "--nnodes=2")
    launcher = job.start()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        # Of the launcher's process group, which is that of the tests.
        stranger.send_signal(signal.SIGSTOP)
        until(lambda: state(stranger.pid) == "T")
        launcher.send_signal(signal.SIGTSTP)
        until(lambda: "Ctrl-Z has no effect" in job.output(0))
        job.start()
        assert job.ends() == [0, 0]
        assert state(stranger.pid) == "T"
        stranger.kill()


@pytest.mark.parametrize("is_stranger", [False, True])
def test_hosts_that_one_mpirun_has_started_know_each_other_by_it(
    tmp_path: Path, *, is_stranger: bool
) -> None:
    seen = '[ -z "$FLEETRUN_TOKEN" ] && touch "../no_token.$R"'
    job = Meeting(tmp_path, seen, "--rdzv_timeout=5" if is_stranger else "--spares=0", token="")
    for rank in range(2):
        # Set like this by mpirun of Open MPI 4.
        job.env |= {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_MCA_orte_precondition_transports": f"{rank * is_stranger:016x}-{7:016x}",
        }
        job.start()
    assert job.ends() == ([4, 4] if is_stranger else [0, 0])
    if is_stranger:
        assert "another token" in job.output(0) + job.output(1)
        return
    assert "FLEETRUN_TOKEN" not in job.output(0) + job.output(1)
    assert len([*tmp_path.glob("no_token.*")]) == 2


@pytest.mark.parametrize("port", ["0", "free"])
def test_the_first_host_says_what_to_type_on_the_others(tmp_path: Path, port: str) -> None:
    job = Meeting(tmp_path, 'echo "here is $R of $PADDLE_TRAINERS_NUM"')
    job.options = ("--nnodes=2", "--host=127.0.0.1", "--env", "MY_TOKEN=hush", "--grace=3")
    if port == "free":
        job.options = (f"--master=:{job.port}", *job.options)
    else:
        job.port = 0
    first = Command(tmp_path, job.script, *job.options, ranks=1)
    launcher = first.start(env=job.env)
    assert launcher.stderr is not None
    remark = launcher.stderr.readline().decode()
    assert remark.endswith(
        "This host is the first of 2. Run this on the others with the same FLEETRUN_TOKEN:\n"
    )
    line = launcher.stderr.readline().decode()
    words = shlex.split(line)
    # As it was started here.
    assert words[1:3] == ["-m", "fleetrun"]
    words = words[2:]
    job.port = job.port or int(words[1].split(":")[1])
    assert words[1] == f"--master=127.0.0.1:{job.port}"
    assert words[2:] == [
        *("--nnodes=2", "--quiet", "--nproc_per_node=1", "--env=MY_TOKEN=***", "--grace=3"),
        first.argv[-1],
    ]
    other = tmp_path / "other"
    other.mkdir()
    second = Command(other, job.script, ranks=1)
    second.argv = [*FLEETRUN, "--host=127.0.0.1", *words[1:]]
    # Else it might listen there itself, as it is on the same host.
    until(job.is_served)
    assert second.run(env=job.env).code == 0
    done = first.finish(launcher)
    assert (done.code, done.out) == (0, b"here is 0 of 2\n")


def test_a_job_of_which_every_host_is_silent_hangs(tmp_path: Path) -> None:
    job = Meeting(tmp_path, "exec sleep 1000", "--nnodes=2", "--hang_timeout=0.3", "--grace=1")
    job.start()
    job.start()
    assert job.ends() == [124, 124]
    assert "The job hung: for" in job.output(0)
    assert "The job hung for" in job.output(1)
    assert "127.0.0.1 tells where each rank stands." in job.output(1)
    assert "failed there first" not in job.output(1)


@pytest.mark.parametrize("options", [("--grace=3",), ("--grace=60", "--hang_timeout=0.5")])
def test_the_exception_of_a_rank_that_does_not_end_is_the_verdict_of_all_hosts(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    stay = "import atexit, threading; atexit.register(threading.Event().wait)"
    script = f"[ $R = 0 ] && exec sleep 1000; exec {sys.executable} -c '{stay}; [][0]'"
    job = Meeting(tmp_path, script, "--nnodes=2", *options)
    job.start()
    job.start()
    assert job.ends() == [1, 1]
    told = job.output(0) + job.output(1)
    assert "Rank 1 raised IndexError" in told
    assert len(re.findall("rank 1 exited with 1", told, re.IGNORECASE)) == 2


# The evidence of a training process, written by a shell: on the second host a field has no effect.
EVIDENCE = """
status=effective
[ "$PADDLE_TRAINER_ID" = 0 ] || status=no_effect
setting() { printf '{"name": "%s", "asked": 1, "in_effect": 1, "status": "%s"}' "$1" "$2"; }
what='"schema": 1, "kind": "strategy", "restart": 0, "complete": true, "updates": 1'
printf '{%s, "fields": [%s, %s]}\\n' \\
    "$what" "$(setting fuse_all_reduce_ops effective)" "$(setting fuse_grad_size_in_MB $status)" \\
    >>"$FLEETRUN_RECORDS"
"""


def test_each_host_shows_what_is_not_in_effect_on_its_ranks(tmp_path: Path) -> None:
    options = ("--nnodes=2", "--strategy=comm_fusion", "--strategy_strict")
    job = Meeting(tmp_path, EVIDENCE, *options)
    job.start()
    job.start()
    assert job.ends() == [STRATEGY_REJECTED, STRATEGY_REJECTED]
    for host in range(2):
        assert "ank 1: fuse_grad_size_in_MB has no effect" in job.output(host)
    assert "  NO EFFECT" in job.output(1)
