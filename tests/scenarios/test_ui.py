"""`--ui`: the launcher's terminal shows the ranks, and is as it was afterwards."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from processes import assert_no_survivors, survivors
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from terminals import Terminal

pytestmark = pytest.mark.slow

TRAIN = """
step = 0
while not os.path.exists("go"):
    step += 1
    print(f"step {step} loss {1 / step:.3f}", flush=True)
    time.sleep(0.05)
if rank and os.path.exists("fail"):
    raise ValueError("no such column")
"""


def environ(job: Command) -> dict[str, str]:
    return {**job.environ(), "TERM": "xterm-256color"}


def a_job(folder: Path, terminal: Terminal, *options: str) -> Command:
    size = struct.pack("HHHH", 24, 100, 0, 0)
    fcntl.ioctl(terminal.theirs, termios.TIOCSWINSZ, size)
    return Command.python(folder, TRAIN, "--ui", *options)


def test_the_job_is_shown_and_its_report_comes_at_the_end(
    tmp_path: Path, terminal: Terminal
) -> None:
    job = a_job(tmp_path, terminal)
    before = terminal.settings()
    launcher = terminal.start(job.argv, environ(job), tmp_path)
    until(terminal.shows(b"\x1b[?1049h"))
    until(terminal.shows(b"2 running; "))
    (tmp_path / "fail").touch()
    (tmp_path / "go").touch()
    assert terminal.end(launcher) == 1
    _, _, below = terminal.shown.rpartition(b"\x1b[?1049l")
    # The last table, and then the launcher's messages.
    places = [below.index(b"exit 1"), below.index(b"ValueError: no such column")]
    assert places == sorted(places)
    assert terminal.settings() == before
    assert_no_survivors(job.marker, 0.0)


@pytest.mark.parametrize("how", ["q", "kill"])
def test_the_job_goes_on_when_the_screen_is_given_back(
    tmp_path: Path, terminal: Terminal, how: str
) -> None:
    job = a_job(tmp_path, terminal)
    before = terminal.settings()
    launcher = terminal.start(job.argv, environ(job), tmp_path)
    until(terminal.shows(b"2 running; "))
    if how == "q":
        terminal.type(b"q")
    else:
        [viewer] = [pid for pid, words in survivors(job.marker).items() if "'top'" in words]
        os.kill(viewer, signal.SIGKILL)
    until(terminal.shows(b"The job goes on; `fleetrun top` shows it again."))
    assert b"\x1b[?1049l" in terminal.shown
    assert launcher.poll() is None
    assert terminal.settings() == before
    (tmp_path / "go").touch()
    assert terminal.end(launcher) == 0
    assert_no_survivors(job.marker, 0.0)


def test_ctrl_c_ends_the_job_and_the_screen(tmp_path: Path, terminal: Terminal) -> None:
    job = a_job(tmp_path, terminal)
    before = terminal.settings()
    launcher = terminal.start(job.argv, environ(job), tmp_path)
    until(terminal.shows(b"2 running; "))
    terminal.type(b"\x03")
    assert terminal.end(launcher) == 130
    assert b"asked ranks 0-1 to stop" in terminal.shown.rpartition(b"\x1b[?1049l")[2]
    assert b"The job goes on" not in terminal.shown
    assert terminal.settings() == before
    assert_no_survivors(job.marker, 0.0)


def test_without_a_terminal_it_is_as_always(tmp_path: Path) -> None:
    done = Command(tmp_path, "echo shown $R", "--ui").run()
    assert (done.code, done.out, done.stderr) == (0, b"shown 0\n", "")


@pytest.mark.parametrize("other", ["--debug=0", "--stdin=0"])
def test_one_terminal_is_not_given_to_two(tmp_path: Path, other: str) -> None:
    done = Command(tmp_path, "touch born", "--ui", other).run()
    assert done.code == 2
    assert f"--ui and {other[:-2]} both want the terminal" in done.stderr
    assert not (tmp_path / "born").exists()
