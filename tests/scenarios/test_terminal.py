"""At a real terminal: Ctrl-C and Ctrl-Z do what people expect, and the terminal stays as it was."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from commandline import Command
from processes import assert_no_survivors
from terminals import COUNT, Terminal, state, stopped_in_a_shell
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

# In Python: a shell may wait for a child that is stopped before it can start, and not stop itself.
WAIT = """
with open(f"pid{rank}", "w") as file:
    file.write(str(os.getpid()))
open(f"ready{rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def test_s27_ctrl_c_reaches_each_rank_once(tmp_path: Path, terminal: Terminal) -> None:
    job = Command.python(tmp_path, COUNT)
    before = terminal.settings()
    launcher = terminal.start(job.argv, env=job.environ(), cwd=tmp_path)
    until(terminal.shows(b"working"))
    job.wait_for("ready0", "ready1")
    terminal.type(b"\x03")
    until(terminal.shows(b"asked ranks 0-1 to stop"))
    job.wait_for("heard0", "heard1")
    (tmp_path / "go").touch()
    until(lambda: launcher.poll() is not None)
    terminal.read()
    assert launcher.wait() == 130
    for rank in range(2):
        assert (tmp_path / f"heard{rank}").read_text() == "2\n"
    assert b"Traceback" not in terminal.shown
    assert terminal.settings() == before
    assert_no_survivors(job.marker, 0.0)


def test_s33_ctrl_z_and_fg_in_a_shell(tmp_path: Path, terminal: Terminal) -> None:
    job = Command.python(tmp_path, WAIT)
    with stopped_in_a_shell(terminal, job) as everybody:
        terminal.type(b"fg; echo code=$?\n")
        until(lambda: all(state(pid) in "SRD" for pid in everybody))
        (tmp_path / "go").touch()


def test_s33_who_is_continued_by_its_number_goes_on_with_what_it_has_started(
    tmp_path: Path, terminal: Terminal
) -> None:
    sleep = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    start = f"import subprocess\nchild = subprocess.Popen([sys.executable, '-c', {sleep!r}])\n"
    job = Command.python(tmp_path, f"{start}{WAIT}\nchild.wait()\nopen(f'done{{rank}}', 'w')")
    with stopped_in_a_shell(terminal, job) as everybody:
        (tmp_path / "go").touch()
        os.kill(everybody[-1], signal.SIGCONT)
        job.wait_for("done0", "done1")
        terminal.type(b"wait; echo code=$?\n")


def test_ctrl_z_has_no_effect_where_no_shell_could_continue_the_job(
    tmp_path: Path, terminal: Terminal
) -> None:
    # The first rank reads the terminal, and is stopped by it, as its child is.
    script = "touch ready$R; (until [ -e go ]; do sleep 0.02; done)"
    job = Command(tmp_path, script)
    launcher = terminal.start(job.argv, env=job.environ(), cwd=tmp_path)
    job.wait_for("ready0", "ready1")
    terminal.type(b"\x1a")
    until(terminal.shows(b"Ctrl-Z has no effect: no shell could continue the job."))
    (tmp_path / "go").touch()
    assert terminal.end(launcher) == 0
