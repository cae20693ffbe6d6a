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
from fleetrun.remote import logs, ssh
from fleetrun.remote.ssh import HostOrder
from fleetrun.run import libc
from fleetrun.rundir.folder import write_all

# Not by -m, which would take modules of the folder for Python's own.
_MAIN = os.path.join(os.path.dirname(fleetrun.__file__), "__main__.py")
# The exit code if nothing was started.
_UNUSED = 0


def run(silence_s: float = ssh.SILENCE_S) -> None:
    """Serve the head, and exit with fleetrun's exit code.

    A head that is silent for SILENCE_S seconds counts as gone.
    """
    # The job's end would wait 10 ms for the interpreter's.
    os._exit(_serve(_lines(silence_s)))


def _lines(silence_s: float) -> Iterator[bytes]:
    """Yield the lines of standard input until it ends, or nothing comes for SILENCE_S seconds."""
    rest = b""
    while select.select([0], [], [], silence_s)[0]:
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
    if not os.path.isdir(order.cwd):
        return _refuse(f"there is no folder {order.cwd}.")
    if order.pid:
        _tell(order.pid)
        logs.send(os.path.join(order.cwd, order.log_dir), order.pid)
        return 0
    process = _start(order)
    pidfd = os.pidfd_open(process.pid)
    threading.Thread(target=_obey, args=(lines, pidfd), daemon=True).start()
    return shell_code(process.wait())


def _refuse(sentence: str) -> int:
    write_all(2, sentence.encode() + b"\n")
    return EnvironmentFault.exit_code


def _tell(pid: int) -> None:
    """End what the login shell has printed."""
    write_all(1, b"\n%b%d\n" % (ssh.MARK, pid))


def _start(order: HostOrder) -> subprocess.Popen[bytes]:
    """Start fleetrun as ORDER says, once the head knows its pid."""
    ours = os.getpid()

    def prepare() -> None:
        # If we are killed, nothing else would end the launcher.
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != ours:
            os._exit(_UNUSED)
        _tell(os.getpid())

    return subprocess.Popen(
        [sys.executable, _MAIN, *order.words],
        cwd=order.cwd,
        env={**os.environ, **order.environ},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - there are no threads yet
    )


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
