"""Runs the command of --on_end when the job has ended; a failure changes no exit code."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

TIMEOUT_S = 30.0


def notify(
    command: str, text: str, log: Callable[[str], None], timeout_s: float = TIMEOUT_S
) -> None:
    """Write the JSON object TEXT to the standard input of the shell COMMAND.

    It is killed after TIMEOUT_S seconds. LOG gets a line if it fails.
    """
    with subprocess.Popen(  # noqa: S602 - it is the user's own command line
        command, shell=True, stdin=subprocess.PIPE, stdout=2, start_new_session=True, text=True
    ) as child:
        try:
            child.communicate(text, timeout=timeout_s)
            why = f"exited with {child.returncode}" if child.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            why = "did not end in time and is killed"
    if why:
        log(f"The command of --on_end {why}.")
