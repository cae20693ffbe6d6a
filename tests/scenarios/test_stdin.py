"""At a real terminal: the only rank that is shown can ask its user, and every key works."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from processes import assert_no_survivors
from terminals import COUNT, Terminal, launcher_of, state, stopped_in_a_shell
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def ended(launcher: subprocess.Popen[bytes], terminal: Terminal, job: Command) -> int:
    """Wait for the end of LAUNCHER; no process may be left."""
    until(lambda: launcher.poll() is not None or terminal.shows(b"\0")())
    terminal.read()
    # After a kill -9 of a launcher its supervisor needs a moment.
    assert_no_survivors(job.marker)
    return launcher.returncode


ASK = """
if rank == 0:
    print("hello", input("name? "), flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_input_asks_the_user_of_the_shown_rank(
    tmp_path: Path, terminal: Terminal, ranks: int
) -> None:
    job = Command.python(tmp_path, ASK, ranks=ranks)
    before = terminal.settings()
    launcher = terminal.start(job.argv, env=job.environ(), cwd=tmp_path)
    until(terminal.shows(b"name? "))
    terminal.type(b"Ada\n")
    assert ended(launcher, terminal, job) == 0
    assert b"hello Ada" in terminal.shown
    assert terminal.settings() == before


@pytest.mark.parametrize(
    ("code", "prompt", "typed"),
    [
        (ASK, b"name? ", b"Ada\n"),
        ("if rank == 0: breakpoint()\nhere = rank", b"(Pdb) ", b"c\n"),
        ("import getpass\nif rank == 0: getpass.getpass()", b"Password: ", b"secret\n"),
    ],
)
def test_a_prompt_that_waits_for_its_user_is_no_hang(
    tmp_path: Path, terminal: Terminal, code: str, prompt: bytes, typed: bytes
) -> None:
    wait = "\nwhile rank and not os.path.exists('go'): time.sleep(0.1)"
    job = Command.python(tmp_path, code + wait, "--hang_timeout=0.5")
    launcher = terminal.start(job.argv, env=job.environ(), cwd=tmp_path)
    until(terminal.shows(prompt))
    # Several times as long as a hang.
    began = time.monotonic()
    until(lambda: began + 2.5 < time.monotonic() or launcher.poll() is not None)
    assert launcher.poll() is None
    (tmp_path / "go").touch()
    terminal.type(typed)
    assert ended(launcher, terminal, job) == 0


@pytest.mark.parametrize("key", [b"\x03", signal.SIGINT])
def test_who_reads_the_terminal_is_interrupted_once(
    tmp_path: Path, terminal: Terminal, key: bytes | int
) -> None:
    job = Command.python(tmp_path, COUNT)
    launcher = terminal.start(job.argv, env=job.environ(), cwd=tmp_path)
    until(terminal.shows(b"working"))
    job.wait_for("ready0", "ready1")
    if isinstance(key, bytes):
        terminal.type(key)
    else:
        launcher.send_signal(key)
    until(terminal.shows(b"asked ranks 0-1 to stop"))
    job.wait_for("heard0", "heard1")
    (tmp_path / "go").touch()
    assert ended(launcher, terminal, job) == 130
    for rank in range(2):
        assert (tmp_path / f"heard{rank}").read_text() == "2\n"


def test_the_key_for_stacks_ends_nobody(tmp_path: Path, terminal: Terminal) -> None:
    job = Command.python(tmp_path, COUNT, ranks=1)
    job.argv.remove("--quiet")
    launcher = terminal.start(job.argv, env=job.environ(), cwd=tmp_path)
    job.wait_for("ready0")
    terminal.type(b"\x1c")
    until(terminal.shows(b"he stacks of 1 process are in"))
    (tmp_path / "go").touch()
    assert ended(launcher, terminal, job) == 0


@pytest.mark.parametrize("leave", ["os.setpgrp()", "os.setsid()"])
def test_who_leaves_the_group_of_the_terminal_is_ended_with_the_others(
    tmp_path: Path, terminal: Terminal, leave: str
) -> None:
    code = f"if rank == 0: {leave}\nopen(f'ready{{rank}}', 'w').close()\ntime.sleep(1000)"
    job = Command.python(tmp_path, code)
    launcher = terminal.start(job.argv, env=job.environ(), cwd=tmp_path)
    job.wait_for("ready0", "ready1")
    terminal.type(b"\x03")
    assert ended(launcher, terminal, job) == 130
    assert b"Killing" not in terminal.shown


FAMILY = """
import subprocess
from functools import partial
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open(f"child{rank}", "w").write(str(child.pid))
open(f"rank{rank}", "w").write(str(os.getpid()))
"""


@pytest.mark.parametrize("end", ["exit", "term", "kill launcher"])
def test_what_the_rank_at_the_terminal_leaves_behind_is_ended(
    tmp_path: Path, terminal: Terminal, end: str
) -> None:
    wait = "" if end == "exit" else "time.sleep(100)"
    job = Command.python(tmp_path, f"{FAMILY}\nopen(f'ready{{rank}}', 'w').close()\n{wait}")
    # Other processes of the launcher's group: a shell, and its next command.
    script = f"{' '.join(job.argv)}; echo code=$?; touch after; read line; echo got=$line"
    before = terminal.settings()
    shell = terminal.start(["sh", "-c", script], env=job.environ(), cwd=tmp_path)
    job.wait_for("ready0", "ready1")
    if end != "exit":
        launcher = launcher_of(int((tmp_path / "rank0").read_text()))
        os.kill(launcher, signal.SIGTERM if end == "term" else signal.SIGKILL)
    job.wait_for("after")
    # The shell itself has the marker, too; only its children count.
    for rank in range(2):
        child = int((tmp_path / f"child{rank}").read_text())
        until(partial(is_gone, child))
    terminal.type(b"typed\n")
    until(terminal.shows(b"got=typed"))
    assert ended(shell, terminal, job) == 0
    code = {"exit": 0, "term": 143, "kill launcher": 137}[end]
    assert b"code=%d\r\n" % code in terminal.shown
    assert terminal.settings() == before


def is_gone(pid: int) -> bool:
    try:
        return state(pid) == "Z"
    except OSError:
        return True


ASK_SECRETLY = """
import getpass
if rank == 0:
    open("asking", "w").close()
    getpass.getpass()
time.sleep(100)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_terminal_that_a_password_was_asked_at_echoes_again(
    tmp_path: Path, terminal: Terminal, signum: signal.Signals
) -> None:
    job = Command.python(tmp_path, ASK_SECRETLY, "--grace=0.1")
    before = terminal.settings()
    launcher = terminal.start(job.argv, env=job.environ(), cwd=tmp_path)
    job.wait_for("asking")
    until(lambda: terminal.settings() != before)
    launcher.send_signal(signum)
    ended(launcher, terminal, job)
    until(lambda: terminal.settings() == before)


def test_ctrl_z_fg_and_a_read_in_the_background(tmp_path: Path, terminal: Terminal) -> None:
    code = "open(f'pid{rank}', 'w').write(str(os.getpid()))\nopen(f'ready{rank}', 'w').close()\n"
    code += "while not os.path.exists('ask'): time.sleep(0.01)\n" + ASK
    code += "while not os.path.exists('go'): time.sleep(0.01)"
    job = Command.python(tmp_path, code)
    with stopped_in_a_shell(terminal, job) as everybody:
        terminal.type(b"bg\n")
        until(lambda: all(state(pid) in "SRD" for pid in everybody))
        # It must not read in the background.
        (tmp_path / "ask").touch()
        until(lambda: all(state(pid) == "T" for pid in everybody))
        terminal.type(b"fg; echo code=$?\n")
        until(lambda: all(state(pid) in "SRD" for pid in everybody))
        terminal.type(b"Ada\n")
        until(terminal.shows(b"hello Ada"))
        (tmp_path / "go").touch()
