"""Real ranks that hang, or only seem to hang."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import fakedriver
import pytest
from commandline import Command
from waiting import LONG_S, patient, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

# Rank 1 waits for an event in `load_batch`, the others for a lock in `meet`.
DEADLOCK = """
import threading
def fetch():
    raise ValueError("a broken sample")
def load_batch():
    # As Paddle's DataLoader.
    threading.Thread(target=fetch).start()
    threading.Event().wait()
def meet():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
print("up", flush=True)
open(f"up{rank}", "w").close()
load_batch() if rank == 1 else meet()
"""
# Runs until a file of the name exists.
LIVE_UNTIL = """
open(f"alive{{rank}}", "w").close()
while not os.path.exists(f"{}"):
    print(".", flush=True)
    time.sleep(0.01)
"""
NO_SPY = {"PATH": "/usr/bin:/bin"}


def stacks(job: Command, rank: int) -> str:
    return (job.folder / "log" / "latest" / f"stacks.{rank}.txt").read_text()


def test_s61_ranks_that_wait_for_each_other_are_stopped_and_the_odd_one_named(
    tmp_path: Path,
) -> None:
    job = Command.python(tmp_path, DEADLOCK, "--hang_timeout=0.8", ranks=3)
    ended = job.run(env=NO_SPY)
    assert ended.code == 124
    assert "The job hung: for " in ended.stderr
    assert "Rank 1 stands in wait (threading.py:" in ended.stderr
    assert "called from load_batch (script-" in ended.stderr
    assert "unlike the rest" in ended.stderr
    assert "Ranks 0, 2 stand in meet (script-" in ended.stderr
    assert "stacks.*.txt" in ended.stderr
    assert "Rank 1 had lost a thread to ValueError: a broken sample; its log is" in ended.stderr
    assert "in load_batch" in stacks(job, 1)
    assert "in meet" in stacks(job, 2)
    (hung,) = [event for event in job.events() if event["event"] == "hung"]
    assert hung["odd"] == ["rank 1"]
    assert job.events()[-1]["exit_code"] == 124


def test_s61_a_hang_may_be_followed_by_another_attempt(tmp_path: Path) -> None:
    code = "if os.path.exists('tried'): sys.exit()\nopen('tried' if rank else 'x', 'w').close()"
    job = Command.python(tmp_path, f"{code}\n{DEADLOCK}", alive(), "--max_restart=1", ranks=2)
    ended = job.run(env=NO_SPY)
    assert ended.code == 0
    assert [event["attempt"] for event in job.events() if event["event"] == "started"][2:] == [1, 1]
    assert "in load_batch" in stacks(job, 1)


def started(job: Command) -> dict[int, int]:
    """Return the process ids of the ranks that have been started."""
    return {e["rank"]: e["pid"] for e in job.events() if e["event"] == "started"}


def alive() -> str:
    """Return the option of a job that does not hang: twice as long as where a hang is awaited.

    On a busy machine, who is alive may get no processor for more than a second.
    """
    return f"--hang_timeout={patient(1.6):.1f}"


# Computes until END seconds have passed, in fifty functions one after the other: each is short, and
# a sample of the stack finds another one.
COMPUTE = """
import random, time
exec("\\n".join(f"def step{n}():\\n    for _ in range(3000): pass" for n in range(50)))
def compute(end):
    end += time.time()
    while time.time() < end:
        globals()[f"step{random.randrange(50)}"]()
"""
SPIN = """
def spin():
    end = time.time() + 60
    while time.time() < end: pass
"""
# fleetrun's callback after an update writes it like this.
UPDATE = "open(os.environ['FLEETRUN_HEARTBEAT'], 'w').write('1 update')"


def test_s62_a_rank_whose_stack_moves_is_alive(tmp_path: Path) -> None:
    # The other rank spins while it waits, as at the end of an evaluation.
    code = f"{COMPUTE}{SPIN.replace('60', '3.5')}\n{UPDATE}\ncompute(3.5) if rank else spin()"
    assert Command.python(tmp_path, code, alive()).run(env=NO_SPY).code == 0


def test_s62_a_program_that_a_rank_waits_for_is_alive(tmp_path: Path) -> None:
    # A compiler, say; the Python that has started it stands still.
    count = "end=$(($(date +%s) + 4)); while [ $(date +%s) -lt $end ]; do seq 99999 >$0; done"
    code = f"import subprocess\n{UPDATE}\nsubprocess.run(['sh', '-c', '{count}', os.devnull])"
    assert Command.python(tmp_path, code, alive(), ranks=1).run(env=NO_SPY).code == 0


def test_s61_after_an_update_ranks_that_spin_hang(tmp_path: Path) -> None:
    code = f"{SPIN}\n{UPDATE}\nspin()"
    ended = Command.python(tmp_path, code, "--hang_timeout=0.8").run(env=NO_SPY)
    assert ended.code == 124
    assert "Ranks 0-1 stand in spin" in ended.stderr


@pytest.mark.parametrize(
    "work",
    [
        # New memory, as a compiler takes it; bytes from a file that is in memory; another program.
        "bytes(40_000_000)",
        "os.read(zeros, 1 << 20)",
        "subprocess.run(['sh', '-c', 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done'])",
    ],
)
def test_s62_work_in_one_line_of_python_is_alive(tmp_path: Path, work: str) -> None:
    code = f"""
import subprocess
zeros = os.open("/dev/zero", os.O_RDONLY)
end = time.time() + 3.5
while time.time() < end: {work}
"""
    assert Command.python(tmp_path, code, alive(), ranks=1).run(env=NO_SPY).code == 0


def test_s62_a_busy_rank_that_has_no_stack_to_show_is_alive(tmp_path: Path) -> None:
    code = "import os, time; end = time.time() + 4\nwhile time.time() < end: pass"
    script = f"if [ $R = 1 ]; then exec '{sys.executable}' -I -c '{code}'; else sleep 4; fi"
    assert Command(tmp_path, script, alive()).run(env=NO_SPY).code == 0


@fakedriver.needed
@pytest.mark.parametrize(
    ("load", "code", "wait"),
    [
        pytest.param("100 0", 124, "spin()", id="spinning-100 0"),
        pytest.param("100 30", 0, "time.sleep({})", id="idle-100 30"),
        pytest.param("60 0", 0, "time.sleep({})", id="idle-60 0"),
    ],
)
def test_s61_a_gpu_that_waits_in_a_kernel_is_no_life_and_one_that_works_is(
    tmp_path: Path, load: str, code: int, wait: str
) -> None:
    (tmp_path / "load").write_text(load)
    env = {**NO_SPY, **fakedriver.build(tmp_path / "driver"), "CUDA_VISIBLE_DEVICES": "0"}
    # A rank that hangs must not end before a launcher that gets no processor sees it.
    seconds = f"{LONG_S if code else patient(5.0):.1f}"
    # Until its first update, a rank may compute for as long as it likes.
    script = f"{SPIN.replace('60', seconds)}\n{UPDATE}\n{wait.format(seconds)}"
    job = Command.python(tmp_path, script, alive(), ranks=1)
    env["FAKE_LOAD"] = str(tmp_path / "load")
    ended = job.finish(job.start(prefix=fakedriver.HERE, env=env))
    assert ended.code == code
    assert ("The job hung" in ended.stderr) is (code != 0)


def test_s62_a_checkpoint_that_only_writes_is_alive(tmp_path: Path) -> None:
    # In small parts, so that it takes hardly any processor time.
    code = """
file = open(f"checkpoint{rank}", "wb", buffering=0)
for _ in range(40):
    file.write(b"x" * 4096)
    time.sleep(0.1)
"""
    job = Command.python(tmp_path, code, alive())
    if os.statvfs(tmp_path).f_fsid == os.statvfs("/dev/shm").f_fsid:
        pytest.skip("a file system in memory counts no writes")
    assert job.run().code == 0


def test_s62_a_download_without_output_is_alive(tmp_path: Path) -> None:
    # From a server that is no rank to a file, in a child that prints nothing, as `aws s3 cp` does.
    chunk = 65536
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import socket, subprocess
get = "import socket; s = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
get += "\\nfile = open('got', 'wb', 0)\\nwhile got := s.recv({chunk}): file.write(got)"
subprocess.run([sys.executable, "-S", "-c", get]) if rank == 1 else time.sleep(5)
"""
        server.settimeout(LONG_S)
        job = Command.python(tmp_path, code, alive())
        launcher = job.start(env=NO_SPY)
        link, _ = server.accept()
        with link:
            end = time.monotonic() + 5.0
            while time.monotonic() < end and launcher.poll() is None:
                with suppress(OSError):
                    link.sendall(bytes(chunk))
                time.sleep(0.1)
    assert job.finish(launcher).code == 0


def test_sigquit_dumps_all_stacks_and_the_job_goes_on(tmp_path: Path) -> None:
    code = DEADLOCK.replace(
        "load_batch() if", "while not os.path.exists('go'): time.sleep(0.01)\n0 if"
    )
    code = code.replace("else meet()", "else 0")
    job = Command.python(tmp_path, code)
    launcher = job.start_until("up0", "up1", env=NO_SPY)
    os.kill(launcher.pid, signal.SIGQUIT)
    until(lambda: any(event.get("what") == "stacks" for event in job.events()))
    ended = job.release(launcher)
    assert ended.code == 0
    assert "The stacks of 2 processes are in" in ended.stderr
    assert "<module>" in stacks(job, 0)
    assert "<module>" in stacks(job, 1)


def test_s33_a_stopped_rank_is_reported_and_no_hang(tmp_path: Path) -> None:
    job = Command.python(tmp_path, LIVE_UNTIL.format("go") + DEADLOCK, "--hang_timeout=0.8")
    launcher = job.start_until("alive0", "alive1", env=NO_SPY)
    # A rank may be faster than the launcher's first event about it.
    until(lambda: len(started(job)) == 2)
    pid = started(job)[0]
    os.kill(pid, signal.SIGSTOP)

    def noticed(what: str) -> list[float]:
        return [event["monotonic"] for event in job.events() if event.get("what") == what]

    until(lambda: noticed("stopped"))
    (tmp_path / "go").touch()
    # Twice the time after which it would be a hang.
    began = time.monotonic()
    until(lambda: began + 1.6 < time.monotonic() or launcher.poll() is not None)
    assert launcher.poll() is None
    os.kill(pid, signal.SIGCONT)
    until(lambda: noticed("continued"))
    # It hangs by itself, and that is detected again.
    ended = job.finish(launcher)
    assert ended.code == 124
    assert f"Rank 0, pid {pid}, is stopped (T); `kill -CONT {pid}` lets it go on." in ended.stderr
    assert "rank 0 goes on." in ended.stderr.lower()


def test_s61_a_job_that_is_told_to_end_is_not_hung(tmp_path: Path) -> None:
    told = "lambda *_: open(f'told{rank}', 'w').close()"
    code = f"import signal; signal.signal(signal.SIGTERM, {told})\n"
    code += LIVE_UNTIL.format("told{rank}") + DEADLOCK
    job = Command.python(tmp_path, code, "--hang_timeout=0.8", "--grace=1.5")
    launcher = job.start_until("alive0", "alive1", env=NO_SPY)
    os.kill(launcher.pid, signal.SIGTERM)
    ended = job.finish(launcher)
    assert ended.code == 143
    assert "hung" not in ended.stderr
