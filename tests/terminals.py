"""A real terminal in tests, with somebody before it who reads and types."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

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
    """A pseudo-terminal with somebody before it who reads."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        os.set_blocking(self.ours, False)
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
    # The guard is between them.
    return int(stat_of(int(stat_of(rank)[1]))[1])


def state(pid: int) -> str:
    """Return the letter of the state of PID."""
    return stat_of(pid)[0]


def stat_of(pid: int) -> list[str]:
    """Return what the kernel says of PID."""
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - one line
        return file.read().rpartition(b")")[2].decode().split()
