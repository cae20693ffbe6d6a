"""A real terminal in tests, with a simulated user who reads and types."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
from contextlib import contextmanager
from typing import TYPE_CHECKING

from processes import assert_no_survivors
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from commandline import Command

# Writes a line for each signal, and ends when it may.
COUNT = """
import signal
def heard(number, frame):
    with open(f"heard{rank}", "a") as file:
        file.write(f"{number}\\n")
signal.signal(signal.SIGINT, heard)
signal.signal(signal.SIGTERM, heard)
print("working", flush=True)
open(f"ready{rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""


class Terminal:
    """A pseudo-terminal with a reader."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        os.set_blocking(self.ours, False)
        settings = termios.tcgetattr(self.theirs)
        # Otherwise Ctrl-C discards printed text that was not read yet.
        settings[3] |= termios.NOFLSH
        termios.tcsetattr(self.theirs, termios.TCSANOW, settings)
        self.shown = b""

    def type(self, keys: bytes) -> None:
        """Press KEYS."""
        os.write(self.ours, keys)

    def shows(self, words: bytes) -> Callable[[], bool]:
        """Return whether WORDS have appeared, as a condition to wait for."""

        def condition() -> bool:
            self.read()
            return words in self.shown

        return condition

    def read(self) -> None:
        """Read what there is."""
        try:
            while piece := os.read(self.ours, 65536):
                self.shown += piece
        except OSError:
            # Nothing for now, or nobody holds the other end any more.
            return

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Return the exit code of PROCESS, which could not end while nobody reads what it shows."""

        def condition() -> bool:
            self.read()
            return process.poll() is not None

        until(condition)
        self.read()
        return process.returncode

    def settings(self) -> object:
        """Return how the terminal is set."""
        return termios.tcgetattr(self.ours)

    def start(self, argv: list[str], env: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
        """Start ARGV as a session of its own before this terminal."""
        # The first terminal that a session's leader opens becomes its own.
        take = 'exec <"$0" >"$0" 2>&1 && exec "$@"'
        name = os.ttyname(self.theirs)
        return subprocess.Popen(
            ["sh", "-c", take, name, *argv], env=env, cwd=cwd, start_new_session=True
        )


def launcher_of(rank: int) -> int:
    """Return the launcher of RANK, a process id like that."""
    # The supervisor is between them.
    return int(stat_of(int(stat_of(rank)[1]))[1])


def state(pid: object) -> str:
    """Return the letter of the state of PID."""
    return stat_of(pid)[0]


def stat_of(pid: object) -> list[str]:
    """Return what the kernel says of PID."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


@contextmanager
def stopped_in_a_shell(terminal: Terminal, job: Command) -> Iterator[list[int]]:
    """Give the launcher and the two ranks of JOB, stopped by Ctrl-Z in a shell at TERMINAL.

    The job has to end within; the shell says `code=` and must find its terminal as it was.
    """
    env = {**job.environ(), "PS1": "shell> ", "HISTFILE": ""}
    shell = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
    bash = terminal.start(shell, env=env, cwd=job.folder)
    until(terminal.shows(b"shell> "))
    before = terminal.settings()
    terminal.type(f"{' '.join(job.argv)}; echo code=$?\n".encode())
    job.wait_for("ready0", "ready1")
    ranks = [int((job.folder / f"pid{rank}").read_text()) for rank in range(2)]
    everybody = [*ranks, launcher_of(ranks[0])]
    terminal.type(b"\x1a")
    until(lambda: all(state(pid) == "T" for pid in everybody))
    until(terminal.shows(b"Stopped"))
    terminal.shown = b""
    yield everybody
    until(terminal.shows(b"code=0\r\n"))
    assert terminal.settings() == before
    terminal.type(b"exit\n")
    until(lambda: bash.poll() is not None)
    assert_no_survivors(job.marker, 0.0)
