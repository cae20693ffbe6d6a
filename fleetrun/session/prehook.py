"""The command of --elastic_pre_hook, which a host runs each time before it takes part."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

from fleetrun.records.variables import TOKEN
from fleetrun.run import libc
from fleetrun.run.isolation import IsolatedCall

if TYPE_CHECKING:
    from collections.abc import Mapping

_CHUNK = 65536
# Of what it has written: for a line about its end.
_LONGEST_TAIL, _LONGEST_LINE = 4096, 300


def ask(command: str, environ: Mapping[str, str]) -> IsolatedCall:
    """Run the shell COMMAND in a child; the value of the answer is why it failed, or nothing.

    Raises OSError when no child can be started.
    """
    return IsolatedCall(lambda: trouble(command, environ))


def trouble(command: str, environ: Mapping[str, str]) -> str:
    """Run the shell COMMAND, and return how it failed, with its last line; else nothing."""
    tail = b""
    with subprocess.Popen(
        ("/bin/sh", "-c", command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # The session's token is not for others.
        env={name: value for name, value in environ.items() if name != TOKEN},
        # With who asks for it the shell is killed, too; the launcher sweeps up what that leaves.
        preexec_fn=lambda: libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
    ) as shell:
        assert shell.stdout is not None  # it is a pipe
        while part := os.read(shell.stdout.fileno(), _CHUNK):
            tail = (tail + part)[-_LONGEST_TAIL:]
    code = shell.returncode
    if not code:
        return ""
    lines = tail.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    how = f"exited with {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    return f"{how}: {last[:_LONGEST_LINE]}" if last else how
