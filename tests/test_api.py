"""`fleetrun.launch` from Python: the caller keeps what is its own, and is told how it ended."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkout import ROOT
from ports import free
from processes import MARKER, assert_no_survivors
from waiting import LONG_S, until

import fleetrun
from fleetrun.errors import EnvironmentFault, FleetrunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

HOLD = 'trap "touch asked; exit 0" TERM INT; touch up; while :; do sleep 0.1; done'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand in a folder of the test's own, in which nothing may go on running."""
    marker = os.urandom(8).hex()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARKER, marker)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path
    assert_no_survivors(marker)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_package_itself_imports_nothing() -> None:
    code = (
        "import sys; before = {*sys.modules}; import fleetrun; print({*sys.modules} - before); "
        "from fleetrun import launch; assert launch is fleetrun.launch; fleetrun.Job"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{'fleetrun'}\n"
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        fleetrun.lunch  # type: ignore[attr-defined]  # noqa: B018


def test_a_job_gives_its_exit_code_verdict_and_run_directory(here: Path) -> None:
    (here / "train.py").write_text("import os, sys; print(sys.argv, os.environ['A'])")
    script: Path = Path("train.py")
    args: list[str | float] = ["--epochs", 3, "a b", True]
    done = fleetrun.launch(script, args, nproc_per_node=2, env={"A": "b=c"}, quiet=True)
    assert (done.exit_code, done.verdict) == (0, "all processes finished")
    run = Path(done.run_dir or "")
    expected = "['train.py', '--epochs', '3', 'a b', 'true'] b=c\n"
    assert (run / "workerlog.1").read_text() == expected
    assert run == (here / "log/latest").resolve()


def test_a_second_call_works_like_the_first_and_the_caller_keeps_its_own(here: Path) -> None:
    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    before = (os.getcwd(), dict(os.environ), list(sys.path), handlers, descriptors())
    with subprocess.Popen(["sleep", "1000"]) as child:
        for number in range(2):
            done = fleetrun.launch("bash", ["-c", f"exit {7 + number}"], cwd=here, quiet=True)
            assert (done.exit_code, done.verdict) == (
                7 + number,
                f"rank 0 exited with {7 + number}",
            )
        assert child.poll() is None
        child.kill()
    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    assert (os.getcwd(), dict(os.environ), list(sys.path), handlers, descriptors()) == before


def test_what_is_no_launch_is_an_exception_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    cases: tuple[tuple[dict[str, Any], type[FleetrunError], str], ...] = (
        ({"nproc_per_node": "x"}, UsageError, "--nproc_per_node=x: give a whole number"),
        ({"num_processes": 2}, UsageError, "no such option: --num_processes; use --nproc"),
        ({"detach": True}, UsageError, "has no detach: use wait=False"),
        ({"grace": [1, 2]}, UsageError, "--grace=1,2: give a number of seconds"),
        ({"master": True}, UsageError, "--master needs a value"),
        ({"gpus": [0]}, EnvironmentFault, "--gpus=0 requests devices, but"),
        ({"cwd": "/nosuch"}, EnvironmentFault, r"No such file or directory: '/nosuch'"),
    )
    for given, kind, words in cases:
        for wait in (True, False):
            with pytest.raises(kind, match=words) as error:
                fleetrun.launch("true", wait=wait, **given)
            assert error.value.exit_code == kind.exit_code
    with pytest.raises(EnvironmentFault, match=r"There is no script nosuch\.py"):
        fleetrun.launch("nosuch.py", wait=False)
    with pytest.raises(UsageError, match="args='--epochs 3': give a list"):
        fleetrun.launch("train.py", "--epochs 3")
    assert capfd.readouterr() == ("", "")


def test_output_goes_where_the_callers_own_goes(capfd: pytest.CaptureFixture[str]) -> None:
    fleetrun.launch("bash", ["-c", "echo häppy; exit 3"])
    out, err = capfd.readouterr()
    assert out == "häppy\n"
    assert "rank 0 exited with 3" in err


def test_a_thread_and_an_event_loop_can_launch() -> None:
    codes: list[int | None] = []
    thread = threading.Thread(
        target=lambda: codes.append(fleetrun.launch("bash", ["-c", "exit 4"], quiet=True).exit_code)
    )
    thread.start()
    thread.join()

    async def cell() -> None:
        codes.append(fleetrun.launch("bash", ["-c", "exit 5"], quiet=True).exit_code)
        job = fleetrun.launch("bash", ["-c", "exit 6"], quiet=True, wait=False)
        codes.append((await asyncio.to_thread(job.wait)).exit_code)

    asyncio.run(cell())
    assert codes == [4, 5, 6]


def test_blocked_and_ignored_signals_of_the_caller_are_its_own(here: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        job = fleetrun.launch("sh", ["-c", HOLD], wait=False, quiet=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, before)
    until((here / "up").exists)
    job.stop()
    assert job.wait().exit_code == 143
    assert (here / "asked").exists()


def test_a_job_that_is_not_waited_for(here: Path) -> None:
    job = fleetrun.launch("sh", ["-c", HOLD], wait=False, quiet=True)
    assert job.run_dir == str((here / "log/latest").resolve())
    assert job.poll() is None
    with pytest.raises(TimeoutError, match=f"still runs as process {job.pid}"):
        job.wait(0.01)
    until((here / "up").exists)
    waiting: list[fleetrun.Job] = []
    thread = threading.Thread(target=lambda: waiting.append(job.wait()))
    thread.start()
    # While another thread waits, who looks is not held up.
    assert job.poll() is None
    job.stop()
    thread.join()
    assert waiting == [job.wait()] == [job.poll()] == [job]
    assert (job.exit_code, job.verdict) == (143, "interrupted by SIGTERM")
    job.stop()


def test_a_job_ends_with_its_block_and_at_once_if_it_must(here: Path) -> None:
    with fleetrun.launch("sh", ["-c", HOLD], wait=False, quiet=True):
        until((here / "up").exists)
    assert (here / "asked").exists()
    (here / "up").unlink()
    stubborn = "trap '' TERM; touch up; while :; do sleep 0.1; done"
    job = fleetrun.launch("sh", ["-c", stubborn], wait=False, quiet=True, grace=900)
    until((here / "up").exists)
    job.stop()
    with pytest.raises(TimeoutError):
        job.wait(0.2)
    job.stop()
    assert job.wait(LONG_S).exit_code == 143


def test_a_launcher_that_is_killed_is_an_end_too(here: Path) -> None:
    job = fleetrun.launch("sh", ["-c", HOLD], wait=False, quiet=True)
    until((here / "up").exists)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    assert (job.exit_code, job.verdict) == (137, "interrupted by SIGKILL")


CALLER = """
import fleetrun, sys
try:
    fleetrun.launch("sh", ["-c", sys.argv[1]], quiet=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_ends_with_its_caller(here: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "-c", CALLER, HOLD]
    caller = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    until((here / "up").exists)
    caller.send_signal(signum)
    output, _ = caller.communicate()
    until((here / "asked").exists)
    if signum == signal.SIGINT:
        # When it goes on, nothing of the job is left.
        assert output.endswith(b"interrupted\n")
        assert caller.returncode == 0


def test_options_are_those_of_the_command_line(here: Path) -> None:
    Path("fleetrun.yaml").write_text("log_dir: elsewhere\n", encoding="utf-8")
    done = fleetrun.launch(
        "sh",
        ["-c", "true"],
        nproc_per_node=2,
        tee=[0, 1],
        grace=1.5,
        quiet=True,
        log_overwrite=False,
        master=None,
        env={"NCCL_DEBUG": "INFO"},
        set={},
    )
    assert done.run_dir is not None
    assert done.run_dir.startswith(str(here / "elsewhere"))
    launch = (Path(done.run_dir) / "launch.txt").read_text()
    assert re.search(r"grace +1\.5 ", launch)
    assert re.search(r"tee +0,1 ", launch)


def test_a_dry_run_prints_the_plan(capfd: pytest.CaptureFixture[str]) -> None:
    done = fleetrun.launch("true", dry_run="json")
    assert (done.exit_code, done.verdict, done.run_dir) == (0, "all is done", None)
    assert '"schema": 2' in capfd.readouterr().out


def test_hosts_that_meet_are_waited_for_in_the_background() -> None:
    began = time.monotonic()
    job = fleetrun.launch(
        "true", wait=False, quiet=True, nnodes=2, master=f"127.0.0.1:{free(1)[0]}", rdzv_timeout=600
    )
    assert time.monotonic() - began < LONG_S
    assert job.run_dir is None
    job.stop()
    assert job.wait().exit_code == 143
