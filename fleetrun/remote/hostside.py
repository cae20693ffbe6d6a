"""What ssh starts on a host: runs fleetrun as ordered, as long as its standard input lives.

The first line of input is the order. Empty lines are heartbeats of the head; `stop` asks fleetrun
to end, as does the end of the input or silence: the head was killed, the connection cut, or a
laptop went to sleep.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import fleetrun
from fleetrun import __version__
from fleetrun.errors import EnvironmentFault, shell_code
from fleetrun.remote import ssh
from fleetrun.run import libc
from fleetrun.rundir.folder import write_all

# Not by -m, which would take modules of the folder for Python's own.
_MAIN = os.path.join(os.path.dirname(fleetrun.__file__), "__main__.py")
# The exit code if nothing was started.
_UNUSED = 0


def run() -> None:
    """Serve the head, and exit with fleetrun's exit code."""
    # The job's end would wait 10 ms for the interpreter's.
    os._exit(_serve(_lines()))


def _lines() -> Iterator[bytes]:
    """Yield the lines of standard input until it ends, or nothing comes for SILENCE_S seconds."""
    rest = b""
    while select.select([0], [], [], ssh.SILENCE_S)[0]:
        part = os.read(0, 1 << 16)
        if not part:
            return
        *lines, rest = (rest + part).split(b"\n")
        yield from filter(None, lines)


def _serve(lines: Iterator[bytes]) -> int:
    first = next(lines, None)
    if first is None:
        return _UNUSED
    order = ssh.read(first)
    if order is None or order.version != __version__:
        there = "of another version" if order is None else order.version
        return _refuse(f"fleetrun is {__version__}, and {there} where the job was started.")
    try:
        os.chdir(order.cwd)
    except OSError as error:
        return _refuse(f"the folder {order.cwd} cannot be entered ({error.strerror}).")
    ours = os.getpid()

    def prepare() -> None:
        # If we are killed, nothing else would end the launcher.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != ours:
            os._exit(_UNUSED)

    write_all(2, ssh.MARK + b"\n")
    process = subprocess.Popen(
        [sys.executable, _MAIN, *order.words],
        env={**os.environ, **order.environ},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - there are no threads yet
    )
    if order.attended:
        pidfd = os.pidfd_open(process.pid)
        threading.Thread(target=_obey, args=(lines, pidfd), daemon=True).start()
    return shell_code(process.wait())


def _refuse(sentence: str) -> int:
    write_all(2, sentence.encode() + b"\n")
    return EnvironmentFault.exit_code


def _obey(lines: Iterator[bytes], pidfd: int) -> None:
    """Stop fleetrun, the process of PIDFD, whenever the head asks, and when the head is gone."""
    is_asked = False
    for line in lines:
        if line == ssh.STOP.strip():
            is_asked = True
            _stop(pidfd)
    if not is_asked:
        _stop(pidfd)


def _stop(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        # A stopped launcher (`kill -STOP`) would not end.
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
