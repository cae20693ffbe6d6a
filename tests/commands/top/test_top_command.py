"""`fleetrun top` of real jobs, before a real terminal and in a pipe."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import sys
import termios
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from checkout import environ
from commandline import Command, fleetrun
from waiting import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from terminals import Terminal

pytestmark = pytest.mark.slow

TOP = [sys.executable, "-m", "fleetrun", "top"]
# Trains until it may end; in some tests rank 1 fails.
TRAIN = """
step = 0
while not os.path.exists("go"):
    step += 1
    print(f"step {step} loss {1 / step:.3f}", flush=True)
    time.sleep(0.05)
print("the end", flush=True)
"""


def top(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return fleetrun("top", *words, folder=folder, TERM="xterm-256color")


def started(job: Command) -> dict[str, int]:
    """Return the process ids of the ranks that have started."""
    events = [event for event in job.events() if event["event"] == "started"]
    return {event["process"]: event["pid"] for event in events}


@contextmanager
def running(job: Command, code: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Run JOB with two ranks until the end of the block; it ends with CODE."""
    launcher = job.start()
    # Wait for plan.json, which comes a little later.
    plan = job.folder / "log" / "latest" / "plan.json"
    until(lambda: len(started(job)) == 2 and plan.exists())
    yield launcher
    ended = job.release(launcher)
    assert ended.code == code


@contextmanager
def watched(job: Command, terminal: Terminal, code: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Run JOB under `fleetrun top`."""
    resize(terminal, 24, 120)
    with running(job, code):
        env = environ(TERM="xterm-256color")
        viewer = terminal.start([*TOP, "--interval=0.2"], env, job.folder)
        yield viewer
        viewer.kill()
        viewer.wait()


def resize(terminal: Terminal, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def test_a_job_is_shown_until_its_verdict(tmp_path: Path, terminal: Terminal) -> None:
    before = terminal.settings()
    job = Command.python(tmp_path, f"{TRAIN}\nif rank: sys.exit(7)")
    with watched(job, terminal, code=7) as viewer:
        # The alternate screen, its heads, both ranks with a speed, and a loss.
        until(terminal.shows(b"\x1b[?1049h"))
        until(terminal.shows(b"step/s"))
        until(terminal.shows(b"2 running"))
        until(terminal.shows(b"loss 0."))
        terminal.type(b"?")
        until(terminal.shows(b"these keys"))
        terminal.type(b"?")
        resize(terminal, 10, 30)
        terminal.shown = b""
        until(terminal.shows(b"running"))
        until(lambda: terminal.shows(b"state")() and b"device" not in last_screen(terminal))
        resize(terminal, 24, 120)
        (tmp_path / "go").touch()
        assert terminal.end(viewer) == 0
    screen, _, below = terminal.shown.rpartition(b"\x1b[?1049l")
    assert screen
    assert b"rank 1 exited with 7 (exit code 7)" in below
    assert b"exit 7" in below
    assert b"the end" in below
    assert terminal.settings() == before


def last_screen(terminal: Terminal) -> bytes:
    """Return the last complete screen."""
    return terminal.shown.split(b"\x1b[H")[-2] if terminal.shown.count(b"\x1b[H") > 1 else b"device"


@pytest.mark.parametrize("how", ["q", "interrupt", "terminate"])
def test_the_terminal_is_left_as_it_was(tmp_path: Path, terminal: Terminal, how: str) -> None:
    before = terminal.settings()
    with watched(Command.python(tmp_path, TRAIN), terminal) as viewer:
        until(terminal.shows(b"2 running"))
        if how == "terminate":
            viewer.send_signal(signal.SIGTERM)
        else:
            terminal.type(b"q" if how == "q" else b"\x03")
        assert terminal.end(viewer) == (0 if how == "q" else 130)
        assert terminal.shown.rstrip().endswith((b"\x1b[?1049l", b"\x1b[?25h"))
        assert b"Traceback" not in terminal.shown
        assert terminal.settings() == before


def test_in_a_pipe_it_is_one_table(tmp_path: Path) -> None:
    job = Command.python(tmp_path, TRAIN, "--metrics_period=0.2")
    with running(job):
        log = tmp_path / "log" / "workerlog.1"
        until(lambda: b"step 3" in log.read_bytes())
        ranks = started(job)
        os.kill(ranks["trainer.1"], signal.SIGSTOP)
        try:
            # The launcher measures from time to time.
            until(lambda: "1 stopped" in top(tmp_path).stdout)
            done = top(tmp_path)
        finally:
            os.kill(ranks["trainer.1"], signal.SIGCONT)
    assert (done.returncode, done.stderr) == (0, "")
    # Between them the launcher may warn of the stopped rank.
    head, counts, *_, heads, first, second = done.stdout.splitlines()
    assert re.match(r"script-\w+  running  [\d.]+ s  ", head)
    assert counts.startswith("2 processes: 1 running, 1 stopped")
    assert heads.split()[:6] == ["rank", "state", "device", "pid", "cpu%", "mem"]
    assert first.split()[:4] == ["0", "running", "cpu", str(ranks["trainer.0"])]
    assert second.split()[:4] == ["1", "stopped", "cpu", str(ranks["trainer.1"])]
    assert " loss " in first
    assert "\x1b" not in done.stdout
    over = top(tmp_path, "--once", "--color=always")
    assert "\x1b[32mall processes finished (exit code 0)" in over.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--pattern=x"], "top: no such option: --pattern; see"),
        (["--interval=0"], "--interval=0: give a number of seconds, 0.2 or more, or"),
        (["nothing"], "no such run: nothing"),
    ],
)
def test_a_slip_is_a_sentence(tmp_path: Path, words: list[str], problem: str) -> None:
    done = top(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
