"""Ranks that fail, through the real command line."""

from __future__ import annotations

import os
import re
import signal
import uuid
from typing import TYPE_CHECKING

import ports
import pytest
from commandline import Command
from processes import supervisor_of, survivors
from terminals import state
from waiting import LONG_S, patient, until

if TYPE_CHECKING:
    from pathlib import Path

WAIT_FOR_GO = "touch ready$R; until [ -e go ]; do sleep 0.01; done"


def test_s17_two_that_fail_together_are_both_named_and_one_is_the_cause(tmp_path: Path) -> None:
    end = "[ $R = 1 ] && exit 5; [ $R = 3 ] && exit 6; sleep 60"
    job = Command(tmp_path, f"echo $$ > pid$R; {WAIT_FOR_GO}; {end}", ranks=4)
    launcher = job.start_until("ready0", "ready1", "ready2", "ready3")
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (1, 3)]
    # The launcher learns of both at once.
    supervisor = supervisor_of(launcher.pid)
    os.kill(supervisor, signal.SIGSTOP)
    (tmp_path / "go").touch()
    until(lambda: [state(pid) for pid in pids] == ["Z", "Z"])
    os.kill(supervisor, signal.SIGCONT)
    done = job.finish(launcher)
    assert done.code in {5, 6}
    first, second = (1, 3) if done.code == 5 else (3, 1)
    assert done.stderr.startswith(f"fleetrun: rank {first} exited with {done.code}.")
    later = rf"rank {second} exited with {11 - done.code} \d+\.\d s later"
    assert re.search(later, done.stderr)
    assert "ranks 0, 2 were stopped" in done.stderr


def test_s22_a_rank_that_ends_well_early_is_no_failure(tmp_path: Path) -> None:
    job = Command(tmp_path, f"[ $R = 1 ] && exit 0; {WAIT_FOR_GO}", ranks=3)
    launcher = job.start_until("ready0", "ready2")
    until(lambda: any(event["event"] == "exited" for event in job.events()))
    done = job.release(launcher)
    assert (done.code, done.stderr) == (0, "")


def test_s23_a_host_whose_ranks_end_well_fails_with_the_other_host(tmp_path: Path) -> None:
    hosts, start = [], ports.free(1)[0]
    job = f"--job_id={uuid.uuid4().hex}"
    for number, script in enumerate(("exit 0", "sleep 0.1; exit 7")):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = ("--ips=127.0.0.1,127.0.0.2", f"--host=127.0.0.{number + 1}")
        hosts.append(Command(folder, script, *place, f"--start_port={start}", job, ranks=1))
    launchers = [host.start() for host in hosts]
    done = [host.finish(process) for host, process in zip(hosts, launchers, strict=True)]
    assert [end.code for end in done] == [7, 7]
    assert "Rank 1 exited with 7 on 127.0.0.2" in done[0].stderr
    assert "rank 1 exited with 7" in done[1].stderr


def test_all_hosts_say_why_the_job_starts_again(tmp_path: Path) -> None:
    start, job = ports.free(1)[0], f"--job_id={uuid.uuid4().hex}"
    code = """
if os.environ["PADDLE_RESTART_COUNT"] != "0":
    sys.exit()
if rank == 1:
    raise ValueError("no such column: label")
time.sleep(60)
"""
    hosts = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = ("--ips=127.0.0.1,127.0.0.2", f"--host=127.0.0.{number + 1}", "--max_restart=1")
        hosts.append(Command.python(folder, code, *place, f"--start_port={start}", job, ranks=1))
    launchers = [host.start() for host in hosts]
    done = [host.finish(process) for host, process in zip(hosts, launchers, strict=True)]
    assert [end.code for end in done] == [0, 0]
    why = r"ank 1 failed: ValueError: no such column: label \(script-\w+\.py:7\)"
    assert re.search(rf"r{why} on 127\.0\.0\.2\. Restart 1 of 1\.", done[0].stderr)
    assert re.search(rf"r{why}\. Restart 1 of 1\.", done[1].stderr)


def test_s33_a_rank_that_stands_still_is_ended_with_the_job(tmp_path: Path) -> None:
    job = Command(tmp_path, f"echo $$ > pid$R; {WAIT_FOR_GO}", f"--grace={patient(1.0):.1f}")
    launcher = job.start_until("ready0", "ready1")
    pid = int((tmp_path / "pid1").read_text())
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T")
    launcher.terminate()
    done = job.finish(launcher)
    assert done.code == 143
    assert "Rank 1 had to be killed" in done.stderr


FREEZER = "/sys/fs/cgroup/freezer"


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access(FREEZER, os.W_OK), reason="only the freezer of cgroup v1 withstands SIGKILL"
)
def test_s34_a_rank_that_sigkill_does_not_end_is_named_and_left(tmp_path: Path) -> None:
    job = Command(tmp_path, f"echo $$ > pid$R; {WAIT_FOR_GO}", "--grace=0.2")
    # The real launcher, except for its patience of 30 s.
    patience = "import sys, fleetrun.run.policy as p; p.STUCK_S = 0.5; "
    patience += "from fleetrun.cli.app import main; "
    at = job.argv.index("-m")
    job.argv[at : at + 2] = ["-c", patience + "sys.exit(main())"]
    launcher = job.start_until("ready0", "ready1")
    cgroup = f"{FREEZER}/{job.marker}"
    os.mkdir(cgroup)
    try:
        write(f"{cgroup}/cgroup.procs", (tmp_path / "pid1").read_text())
        write(f"{cgroup}/freezer.state", "FROZEN")
        launcher.terminate()
        _, errors = launcher.communicate(timeout=LONG_S)
        # Nothing can be done but report it.
        assert launcher.returncode == 143
        assert b"Even SIGKILL did not end rank 1" in errors
        pid = (tmp_path / "pid1").read_text().strip()
        assert f"rank 1, pid {pid}, is still there: state D".encode() in errors
        assert int((tmp_path / "pid1").read_text()) in survivors(job.marker)
    finally:
        write(f"{cgroup}/freezer.state", "THAWED")
        until(lambda: not survivors(job.marker))
        os.rmdir(cgroup)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:  # a kernel's file
        file.write(text)
